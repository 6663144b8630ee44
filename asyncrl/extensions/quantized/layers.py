"""Hooks into SGLang's layers with quantized weights, with which they can start without any and take every publish.

int8: after loading, SGLang 0.5.21 replaces a weight by its transpose, and every parameter by one without a loader, so
that it can neither load a second version nor end an update. With the hook, the parameters stay as they are published,
and the transpose is taken, as a view, where a layer multiplies. For Mixtral in int8, SGLang has a model of its own with
each expert on one rank only; with the hook it takes the one that it takes for fp8.

fp8: attention has a scale of its KV cache, which no publish contains. Engines that start with random weights
(load_format=dummy) draw one, too, and would keep it; with the hook it is 1. Llama's loader renames the scales of blocks
as if each channel had one, and drops them, because no layer has a parameter of that name; with the hook it finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from asyncrl.import_hooks import after_import


def install(arguments: Sequence[str]) -> None:
    """Patch the layers when they are imported. Runs before sglang is imported; `arguments` are the engine's."""
    after_import("sglang.srt.layers.quantization.w8a8_int8", keep_parameters)
    if "dummy" in arguments:
        after_import("sglang.srt.layers.quantization.kv_cache", forget_scales)
        after_import("sglang.srt.models.llama", find_scales)
        after_import("sglang.srt.models.mixtral_quant", fuse_experts)


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


def find_scales(module: Any) -> None:
    """Patch the model, a class of this module, so that it finds the scales of blocks under the name that its loader
    gives them."""
    load = module.LlamaForCausalLM.load_weights

    def load_weights(self: Any, weights: Any) -> Any:
        named = dict(self.named_parameters())
        renamed = {name.replace(".weight_scale_inv", ".weight_scale"): held for name, held in named.items()}
        self.named_parameters = renamed.items
        try:
            return load(self, weights)
        finally:
            del self.named_parameters

    module.LlamaForCausalLM.load_weights = load_weights


def fuse_experts(module: Any) -> None:
    """Replace the model that SGLang registers from this module by Mixtral with fused experts."""
    from sglang.srt.models.mixtral import MixtralForCausalLM

    module.EntryClass = type(module.EntryClass.__name__, (MixtralForCausalLM,), {})
