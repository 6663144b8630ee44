"""Megatron's layers of TransformerEngine: its own spec, with attention over packs in place of TransformerEngine's.

Parameters have other names than under the local spec, and equal values. weights/mapping.py translates them for
everything that goes to engines and HF folders; checkpoints have the keys of the local spec.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from asyncrl.errors import ConfigError
from asyncrl.trainer.attention import PackedAttention
from asyncrl.weights.mapping import WHOLE_WITH_TRANSFORMER_ENGINE


def transformer_engine_spec(
    config: TransformerConfig, vp_stage: int | None, *, separate: bool
) -> TransformerBlockSubmodules:
    """Return Megatron's TransformerEngine spec with attention over packs. Separate norms are not fused with the linear
    layers that follow them. Raises ConfigError if TransformerEngine cannot be imported."""
    try:
        import transformer_engine.pytorch  # noqa: F401
    except (ImportError, RuntimeError, AssertionError) as error:  # the last two are those of an incomplete installation
        remedy = f"TransformerEngine cannot be imported ({error}): install it as in requirements/gpu.txt, or set local."
        raise ConfigError("trainer.layers", "transformer_engine", remedy) from error
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
        if separate:
            _separate_norms(layer)
        else:
            layer.submodules.sharded_state_dict_keys_map = _checkpoint_keys(layer, config)
    return spec


def _separate_norms(layer: ModuleSpec) -> None:
    """Replace linear layers that norm their input by a norm and a linear layer. The parameters then have the names of
    the local spec."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    for inside, linear, outside, norm in (
        (attention, "linear_qkv", parts, "input_layernorm"),
        (attention, "linear_q_up_proj", attention, "q_layernorm"),
        (attention, "linear_kv_up_proj", attention, "kv_layernorm"),
        (parts.mlp.submodules, "linear_fc1", parts, "pre_mlp_layernorm"),
    ):
        if getattr(inside, linear, None) is TELayerNormColumnParallelLinear:
            setattr(inside, linear, TEColumnParallelLinear)
            setattr(outside, norm, TENorm)


def _checkpoint_keys(layer: ModuleSpec, config: TransformerConfig) -> dict[str, str]:
    """Return the beginnings of a layer's keys that the local spec spells differently in checkpoints. The local spec
    stores norms under the names of fused layers, except those of latent attention."""
    if not config.multi_latent_attention:
        return {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    return {
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
        "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
        "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    }


def adapt(model: GPTModel) -> None:
    """Adapt a model of TransformerEngine's layers to gradients in float32 buffers and to the gradient norm."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    for module in model.modules():
        # The matrix product adds to the buffer. (Megatron's own switch would ask the output layer too: it needs Apex.)
        if isinstance(module, TransformerEngineBaseModule) and hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    for name, parameter in model.named_parameters():
        # Megatron's norm takes parameters without this mark from the first tensor-parallel rank alone, and those with
        # it from all. TransformerEngine 2.20 leaves it out for grouped experts, and sets it for copies.
        if ".mlp.experts." in name:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        elif WHOLE_WITH_TRANSFORMER_ENGINE.search(name):
            parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def accumulates_by_itself(module: torch.nn.Module) -> bool:
    """Return whether some layer of a model adds gradients to the buffers itself."""
    return any(getattr(part, "fuse_wgrad_accumulation", False) for part in module.modules())


def fp8_weights(model: torch.nn.Module) -> Iterator[Tensor]:
    """Yield the memory of weights that TransformerEngine's layers keep in FP8 from one micro-batch to the next. The
    first micro-batch of a pass writes it again."""
    for module in model.modules():
        for copy in getattr(module, "_fp8_workspaces", {}).values():
            yield from (part for part in copy.get_metadata().values() if isinstance(part, Tensor))
