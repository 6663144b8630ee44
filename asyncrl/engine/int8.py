"""Hook into SGLang's layers with weights of int8 (w8a8_int8), which keeps their parameters as a publish loads them.

After loading, SGLang 0.5.21 replaces the weight by its transpose, and every parameter by one without a loader, so that
it can neither load a second version nor end an update. With the hook, the parameters stay, and the transpose is taken,
as a view, where a layer multiplies.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from asyncrl.importing import after_import


def install() -> None:
    """Patch the layers when they are imported. Runs before sglang is imported."""
    after_import("sglang.srt.layers.quantization.w8a8_int8", keep_parameters)


def keep_parameters(module: Any) -> None:
    """Patch SGLang's methods for linear layers and for experts, classes of this module."""
    apply = module.W8A8Int8LinearMethod.apply

    def transposed(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        return apply(self, SimpleNamespace(weight=layer.weight.t(), weight_scale=layer.weight_scale), x, bias)

    module.W8A8Int8LinearMethod.apply = transposed
    for method in (module.W8A8Int8LinearMethod, module.W8A8Int8MoEMethod):
        method.process_weights_after_loading = lambda self, layer: None
