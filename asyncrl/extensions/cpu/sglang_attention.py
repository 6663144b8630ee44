"""Attention backend for SGLang on CPU, with one call per layer instead of one per request.

SGLang's torch_native backend attends request by request, repeats key-value heads, and computes a sibling's single token
as a whole sequence. With 64 short requests that took 62 % of the engine's time, against 18 % in all matrix products.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from asyncrl.extensions.cpu.paged_attention import PagedAttentionPlan, attend, make_plan


class BatchedAttention(TorchNativeAttnBackend):
    """Causal self-attention over SGLang's paged cache, with windows and sinks, which the parent class does not have. It
    computes everything else."""

    plans: dict[int | None, PagedAttentionPlan]
    """Those of this forward pass, by the window of a layer, which is None without one."""
    sinks: Tensor | None = None
    """Those of the layer that attends."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the attention plan of a forward pass without a window. SGLang calls this once before the layers of every
        pass."""
        super().init_forward_metadata(forward_batch)
        lengths = forward_batch.seq_lens.tolist()
        decoding = forward_batch.forward_mode.is_decode_or_idle()
        new = [1] * len(lengths) if decoding else forward_batch.extend_seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        self._requests = table[forward_batch.req_pool_indices, : max(lengths, default=0)], lengths, new
        self.plans = {None: make_plan(*self._requests)}

    def forward_extend(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Attend from several new tokens of each request."""
        self.sinks = sinks
        return super().forward_extend(*args, **kwargs)

    def forward_decode(self, *args: Any, sinks: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Attend from one new token of each request."""
        self.sinks = sinks
        return super().forward_decode(*args, **kwargs)

    def _plan(self, window: int | None) -> PagedAttentionPlan:
        """Return the plan of layers with a window of so many tokens before each."""
        if window not in self.plans:
            slots, lengths, new = self._requests
            if self.use_sliding_window_kv_pool:  # layers with windows have a cache of their own
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots.long())
            self.plans[window] = make_plan(slots, lengths, new, window)
        return self.plans[window]

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of the requests that SGLang adds so that all replicas of attention decode equally many."""
        return 1

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if kwargs["is_cross_attn"]:
            return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *args, **kwargs)
        plan = self._plan(kwargs["sliding_window_size"])
        return attend(plan, query, output, k_cache, v_cache, kwargs["scaling"], self.sinks)

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        if kwargs["is_cross_attn"] or not kwargs["causal"]:
            return super()._run_sdpa_forward_extend(query, output, k_cache, v_cache, *args, **kwargs)
        plan = self._plan(kwargs["sliding_window_size"])
        return attend(plan, query, output, k_cache, v_cache, kwargs["scaling"], self.sinks)
