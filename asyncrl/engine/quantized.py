"""Hooks into SGLang's layers with quantized weights, with which they can start without any and take every publish.

int8: after loading, SGLang 0.5.21 replaces a weight by its transpose, and every parameter by one without a loader, so
that it can neither load a second version nor end an update. With the hook, the parameters stay as they are published,
and the transpose is taken, as a view, where a layer multiplies.

fp8: attention has a scale of its KV cache, which no publish contains. Engines that start with random weights
(load_format=dummy) draw one, too, and would keep it; with the hook it is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from asyncrl.importing import after_import


def install(arguments: Sequence[str]) -> None:
    """Patch the layers when they are imported. Runs before sglang is imported; `arguments` are the engine's."""
    after_import("sglang.srt.layers.quantization.w8a8_int8", keep_parameters)
    if "dummy" in arguments:
        after_import("sglang.srt.layers.quantization.kv_cache", forget_scales)


def keep_parameters(module: Any) -> None:
    """Patch SGLang's methods for linear layers and for experts, classes of this module."""
    apply = module.W8A8Int8LinearMethod.apply

    def transposed(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return apply(self, SimpleNamespace(weight=layer.weight.t(), weight_scale=layer.weight_scale), x, bias)

    module.W8A8Int8LinearMethod.apply = transposed
    for method in (module.W8A8Int8LinearMethod, module.W8A8Int8MoEMethod):
        method.process_weights_after_loading = lambda self, layer: None


def forget_scales(module: Any) -> None:
    """Patch SGLang's method for KV caches, a class of this module, which takes 1 for a scale that was not loaded."""
    process = module.BaseKVCacheMethod.process_weights_after_loading

    def unscaled(self: Any, layer: Any) -> None:
        layer.k_scale.fill_(-1.0)
        layer.v_scale.fill_(-1.0)
        process(self, layer)

    module.BaseKVCacheMethod.process_weights_after_loading = unscaled
