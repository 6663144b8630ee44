"""Attention over a pack for Megatron's layer spec, with shared prefixes and explicit positions."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.models.families import family_of
from asyncrl.models.parts import rotary
from asyncrl.trainer.context import gather_rows
from asyncrl.trainer.tree_attention import attend

# Without TransformerEngine, megatron-core 0.16.1 puts a mock here and then calls isinstance with it.
multi_latent_attention.HAVE_TE = isinstance(multi_latent_attention.TELinear, type)


class PackedAttention(MegatronModule):
    """Megatron's core attention over a pack; the pack is passed as the attention mask."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,  # head widths of latent attention, which the tensors show
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":  # a sink for each of this rank's heads
            sinks = torch.zeros(config.num_attention_heads // config.tensor_model_parallel_size)
            self.softmax_offset = torch.nn.Parameter(sinks.to(config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Pack, **_: Any) -> Tensor:
        """Attend within the pack.

        query [N, 1, heads, d], key [N, 1, kv_heads, d], value [N, 1, kv_heads, v] -> [N, 1, heads * v]

        Under context parallelism these are the rows of this rank; its queries attend to the keys of all ranks.
        """
        q, k, v = query[:, 0], key[:, 0], value[:, 0]
        if attention_mask.bounds:
            both = gather_rows(
                torch.cat([k, v], -1), attention_mask.bounds, parallel_state.get_context_parallel_group()
            )
            k, v = both.split([k.shape[-1], v.shape[-1]], -1)
        return attend(q, k, v, attention_mask, self.scale, self.window, self.softmax_offset).flatten(1)[:, None]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what a checkpoint holds: the sinks, divided by heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets
        )
        return found


class PositionRope(RotaryEmbedding):
    """Rotary embedding at the positions that the pack gives. (Megatron's own ignores position_ids and counts rows.)"""

    positions: Tensor | None = None  # [N], or [3, N] with images
    axes: Tensor | None = None  # [pairs], which of three positions turns each pair

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """Return the angles [N, 1, 1, d], or Megatron's own before the first pack is set."""
        if self.positions is None:
            return super().forward(max_seq_len, *args, **kwargs)
        positions = self.positions.to(self.inv_freq.dtype)
        if positions.ndim > 1:
            assert self.axes is not None
            angles = positions.index_select(0, self.axes).t() * self.inv_freq
        else:
            angles = torch.outer(positions, self.inv_freq)
        if self.rotary_interleaved:
            return angles.repeat_interleave(2, -1)[:, None, None, :]
        return torch.cat([angles, angles], -1)[:, None, None, :]


def frequencies(hf: dict[str, Any], plain: Tensor) -> Tensor:
    """Return the angle per position of each rotated pair, as transformers computes it. `plain` holds the unscaled
    angles."""
    kind = rotary(hf)["rope_type"]
    if kind == "default":
        return plain
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {**hf, "model_type": family_of(hf).model_type}  # transformers does not know every publisher's own name
    config = AutoConfig.for_model(**known)
    config.rope_parameters = rotary(hf)  # those of layers without windows
    scaled, factor = ROPE_INIT_FUNCTIONS[kind](config, plain.device)
    assert factor == 1.0 or "attention_factor" in family_of(hf).allows, "check_architecture rejects all others"
    assert scaled.shape == plain.shape
    return scaled


def rotate_locally(model: Any, theta: float) -> None:
    """Give the layers with windows frequencies of their own, which are not scaled."""
    local = RotaryEmbedding(model.config.kv_channels, rotary_percent=1.0, rotary_base=theta)
    local.__class__ = PositionRope
    model.ropes.append(local)
    plain = copy(model.config)
    plain.__dict__.pop("yarn_rotary_scaling_factor", None)

    def turned(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "rotary_pos_emb": local(0)}

    for layer in model.decoder.layers:
        if layer.self_attention.core_attention.window is not None:
            layer.self_attention.config = plain
            layer.self_attention.register_forward_pre_hook(turned, with_kwargs=True)


def sum_rotary_gradients(attention: MLASelfAttention) -> None:
    """Fix latent attention under tensor parallelism without TransformerEngine (megatron-core 0.16.1).

    All heads share the rotated part of the key, so its gradient is the sum over the heads of all ranks. Megatron splits
    each rank's own gradient instead, so the rows of linear_kv_down_proj that produce the rotated part learn from only
    some of the heads. Only sequence parallelism is fixed: without it Megatron refuses to train a mixture of experts.
    """
    if not attention.config.sequence_parallel:
        return

    def gathered(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Gather the features and scatter the rows: [N, 1, (latent + rotated) / tp] -> [N / tp, 1, latent + rotated].

        Megatron then receives complete features and gathers the rows of the rotated part, which sums its gradient.
        """
        return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(output[0])), output[1]

    attention.linear_kv_down_proj.register_forward_hook(gathered)
