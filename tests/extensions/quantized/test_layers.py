"""Hooks into SGLang's quantized layers, on stand-ins for its classes (test_loaded_publishes.py has the real ones)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.extensions.quantized import layers as quantized


def method(after_loading: Any, apply: Any = None) -> type:
    return type("Method", (), {"process_weights_after_loading": after_loading, "apply": apply})


def test_int8_layer_multiplies_by_the_transpose_in_place() -> None:
    def transpose(self: Any, layer: Any) -> None:
        pytest.fail("the parameter is replaced")

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.matmul(layer.weight) * layer.weight_scale.t()

    module = SimpleNamespace(W8A8Int8LinearMethod=method(transpose, apply), W8A8Int8MoEMethod=method(transpose))
    quantized.keep_parameters(module)
    layer = SimpleNamespace(weight=torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), weight_scale=torch.ones(3, 1))
    linear = module.W8A8Int8LinearMethod()
    linear.process_weights_after_loading(layer)
    module.W8A8Int8MoEMethod().process_weights_after_loading(layer)
    assert linear.apply(layer, torch.tensor([[1.0, 1.0]]), None).tolist() == [[3.0, 7.0, 11.0]]


def test_cache_scale_drawn_at_the_start_is_forgotten() -> None:
    def process(self: Any, layer: Any) -> None:
        layer.k_scale_float = 1.0 if layer.k_scale <= 0 and layer.v_scale <= 0 else float(layer.k_scale)

    module = SimpleNamespace(BaseKVCacheMethod=method(process))
    quantized.forget_scales(module)
    layer = SimpleNamespace(k_scale=torch.tensor(3e-4), v_scale=torch.tensor(3e-4))
    module.BaseKVCacheMethod().process_weights_after_loading(layer)
    assert layer.k_scale_float == 1.0


def test_a_loader_that_renames_scales_of_blocks_finds_them() -> None:
    class LlamaForCausalLM(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Module()
            self.proj.weight_scale_inv = torch.nn.Parameter(torch.zeros(1))

        def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
            params = dict(self.named_parameters())
            for name, tensor in weights:
                if (renamed := name.replace(".weight_scale_inv", ".weight_scale")) in params:
                    params[renamed].data.copy_(tensor)

    module = SimpleNamespace(LlamaForCausalLM=LlamaForCausalLM)
    quantized.find_scales(module)
    model = module.LlamaForCausalLM()
    model.load_weights([("proj.weight_scale_inv", torch.ones(1))])
    assert model.proj.weight_scale_inv.tolist() == [1.0]
    assert [name for name, _ in model.named_parameters()] == ["proj.weight_scale_inv"]
