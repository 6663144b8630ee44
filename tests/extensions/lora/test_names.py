"""Names of adapters: those of PEFT for every linear layer of every family."""

from __future__ import annotations

import pytest

from asyncrl.extensions.lora.weights import adapts, projections, rule_of
from asyncrl.weights.mapping import Mapping, tables


@pytest.mark.parametrize("architecture", tables())
def test_every_linear_layer_has_adapters_per_projection(architecture: str) -> None:
    """Those of experts, also shared ones, are named after transformers' modules, whatever the files call them."""
    mapping = Mapping(architecture)
    for rule in tables()[architecture]:
        if not rule.linear:
            continue
        linear = rule.megatron.removesuffix(".weight").format(layer=3, expert=5)
        names = [
            name
            for projection in projections(rule)
            for matrix in "AB"
            for name in rule_of(mapping, f"{linear}.lora.{projection}.{matrix}").hf_names()
        ]
        modules = [name.format(layer=3, expert=5).removesuffix(".weight") for name in rule.hf]
        modules = [module.replace(".shared_mlp.", ".shared_experts.") for module in modules]
        if rule.routed:
            stack = "gate_up_proj" if ".linear_fc1." in rule.megatron else "down_proj"
            modules = [f"model.layers.3.mlp.experts.{stack}"]
        if mapping.tower:
            modules = [f"model.language_model.layers.{module.partition('layers.')[2]}" for module in modules]
        assert names == [f"{module}.lora_{matrix}.weight" for module in modules for matrix in "AB"]
        assert all(adapts(mapping, module.replace("layers.3.", "layers.{layer}.")) for module in modules)
