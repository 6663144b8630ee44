"""Attention over a pack, for Megatron's layer spec: shared prompts, completions as branches, explicit positions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from asyncrl.algo.pack import Pack


class PackedAttention(MegatronModule):
    """Megatron's core attention on torch's SDPA. The pack arrives in the place of the attention mask.

    Two calls a layer, whatever the number of groups: the root on itself, and all units as one padded batch.
    """

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
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Pack, **_: Any) -> Tensor:
        """query [N, 1, heads, d], key and value [N, 1, kv_heads, d] -> [N, 1, heads * d]."""
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
        query, key, value = query[:, 0], key[:, 0], value[:, 0]  # [N, h, d]
        root = attention_mask.root
        parts = []
        if root:
            q, k, v = (x[:root].transpose(0, 1)[None] for x in (query, key, value))
            parts.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)[0].transpose(0, 1))
        parts.append(self._units(query, key, value, attention_mask))
        return torch.cat(parts).flatten(1)[:, None]

    def _units(self, query: Tensor, key: Tensor, value: Tensor, pack: Pack) -> Tensor:
        """All tokens after the root: [N - root, h, d]."""
        count, longest = pack.units.shape
        flat = pack.units.flatten()

        def batched(x: Tensor) -> Tensor:  # [N, h, d] -> [G, h, n, d]
            return x.index_select(0, flat).unflatten(0, (count, longest)).transpose(1, 2)

        def with_root(x: Tensor) -> Tensor:  # [G, h, root + n, d]
            own = batched(x)
            return (
                torch.cat([x[: pack.root].transpose(0, 1)[None].expand(count, -1, -1, -1), own], 2)
                if pack.root
                else own
            )

        out = F.scaled_dot_product_attention(
            batched(query), with_root(key), with_root(value), attn_mask=pack.visible, scale=self.scale
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, pack.places)


class PositionRope(RotaryEmbedding):
    """Rotary embedding at the positions that the pack names. (Megatron's ignores position_ids and counts rows.)"""

    positions: Tensor | None = None

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """[N, 1, 1, d], or Megatron's own before any pack was seen."""
        if self.positions is None:
            return super().forward(max_seq_len, *args, **kwargs)
        angles = torch.outer(self.positions.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat([angles, angles], -1)[:, None, None, :]
