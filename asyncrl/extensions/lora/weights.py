"""The adapters of a network as full tensors, under the names of PEFT: exported and filled as the weights below them
(weights/reshard.py)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from asyncrl.schema import POLICY
from asyncrl.weights.layouts import FUSED_GATE_UP, GATE_UP, LINEAR, QKV, ROW, WHOLE, NameRule
from asyncrl.weights.loading import fill, whole_shapes
from asyncrl.weights.mapping import Mapping, tables, without_numbers
from asyncrl.weights.reshard import Found, Resharder

ADAPTER = re.compile(r"(?P<linear>.+)\.(?P<module>lora(_[\w-]+)?)\.(?P<projection>\w+)\.(?P<matrix>[AB])")
"""Name of an adapter's matrix: that of its linear layer, of the adapter's module there, of the HF projection that it
adapts, and of the matrix."""


def module_of(adapter: str) -> str:
    """Return the name of an adapter's module in a linear layer."""
    return "lora" if adapter == POLICY else f"lora_{adapter}"


def adapter_of(name: str) -> str | None:
    """Return the adapter of which a Megatron parameter is a matrix; None for a parameter of the base."""
    found = ADAPTER.fullmatch(name)
    return (found["module"].removeprefix("lora").removeprefix("_") or POLICY) if found else None


def divides_inputs(rule: NameRule) -> bool:
    """Return whether ranks divide the input features of a linear layer."""
    return LINEAR.get(rule.layout) is WHOLE


def of_expert(stack: Tensor, matrix: str | None, number: int, count: int) -> Tensor:
    """Return one expert's matrix A or B of a stack."""
    return stack.unflatten(0, (count, -1))[number] if matrix == "A" else stack.unflatten(1, (-1, count))[..., number]


def projections(rule: NameRule) -> dict[str, str]:
    """Return PEFT's modules of a linear layer's adapters by their last names. Routed experts have the form of
    PEFT's `target_parameters`: transformers stacks their weights, with gate and up in one."""
    if rule.routed:
        name = "down_proj" if divides_inputs(rule) else "gate_up_proj"
        return {name: f"model.layers.{{layer}}.mlp.experts.{name}"}
    # transformers' name of shared experts, which files of Hunyuan 3 call otherwise
    modules = (re.sub(r"\.shared_\w+\.", ".shared_experts.", name.removesuffix(".weight")) for name in rule.hf)
    return {module.rpartition(".")[2]: module for module in modules}


def matrix_rule(rule: NameRule, projection: str, matrix: str, *, module: str = "lora", whole: bool = False) -> NameRule:
    """Return the rule of matrix A [rank, in] or B [out, rank] of one of a linear layer's projections, in a module
    of `module_of`. `whole` says that every rank holds all of B."""
    layout = ROW if divides_inputs(rule) else WHOLE
    if matrix == "B":
        outputs = FUSED_GATE_UP if rule.routed and rule.layout is GATE_UP else LINEAR.get(rule.layout, WHOLE)
        layout = WHOLE if whole else outputs
    linear = rule.megatron.removesuffix(".weight")
    name = f"{projections(rule)[projection]}.lora_{matrix}.weight"
    megatron = f"{linear}.{module}.{projection}.{matrix}"
    return replace(rule, megatron=megatron, layout=layout, hf=(name,), matrix=matrix)


def rule_of(mapping: Mapping, name: str, *, shared_heads: bool = False) -> NameRule:
    """Return the rule of an adapter's matrix, by its Megatron name with the numbers of the whole model. With
    `shared_heads`, several ranks share a key-value head."""
    found = ADAPTER.fullmatch(name)
    assert found is not None, f"{name} is no matrix of an adapter"
    linear = mapping.find(f"{found['linear']}.weight")
    whole = shared_heads and linear.layout is QKV
    rule = matrix_rule(linear, found["projection"], found["matrix"], module=found["module"], whole=whole)
    return replace(rule, hf=tuple(_in_transformers(mapping, name) for name in rule.hf))


def adapts(mapping: Mapping, module: str) -> bool:
    """Return whether some linear layer has this module of PEFT, named without the number of its layer."""
    linears = (rule for rule in tables()[mapping.architecture] if rule.linear)
    modules = (one for rule in linears for one in projections(rule).values())
    return any(module == _in_transformers(mapping, one) for one in modules)


def _in_transformers(mapping: Mapping, name: str) -> str:
    """Return the name of an adapter's module in transformers, where models that see have a text model inside, even if
    their files do not tell."""
    return re.sub(r"^model\.layers\.", "model.language_model.layers.", name) if mapping.tower else name


class AdapterWeights:
    """The adapters of one rank's part of a network."""

    def __init__(self, weights: Resharder) -> None:
        self._weights = weights

    @cached_property
    def _matrices(self) -> dict[str, list[Found]]:
        """The matrices of each adapter."""
        found: dict[str, list[Found]] = {}
        shared = self._weights.parallel.tp > self._weights.dims.kv_heads
        for chunk, name, of_all in self._weights.names():
            if adapter := adapter_of(name):
                rule = rule_of(self._weights.mapping, of_all, shared_heads=shared)
                found.setdefault(adapter, []).append((chunk, name, rule))
        return found

    def tensors(self, adapter: str = POLICY) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF module + .lora_A.weight or .lora_B.weight, full tensor in float32) of an adapter, as
        `Resharder.hf_tensors`.

        Routed experts have the form of PEFT's `target_parameters`, under the name of transformers' parameter: A of all
        experts one below the other, [experts * rank, in], and B with the expert as its fastest index, [out, rank *
        experts]. (PEFT nests the modules of several parameters, so that names in its files differ.)
        """
        return ((name, tensor.float()) for name, tensor in self._weights.whole(self._matrices.get(adapter, [])))

    @torch.no_grad()
    def load(self, read: Callable[[str, Sequence[int]], Tensor], adapter: str = POLICY) -> None:
        """Fill this rank's part of an adapter from full tensors, which `read` returns by the names and shapes of
        `tensors`."""
        weights = self._weights
        for found, tensor in weights.tensors(self._matrices.get(adapter, [])):
            (name,), (shape,) = found.hf_names(), whole_shapes(weights, found, tensor)
            count, matrix = 1 if found.expert is None else weights.num_experts, found.matrix
            whole = (count * shape[0], shape[1]) if matrix == "A" else (shape[0], shape[1] * count)
            fill(weights, found, tensor, [of_expert(read(name, whole), matrix, found.expert or 0, count)])

    def adapts(self, module: str) -> bool:
        """Return whether some rank has a linear layer for PEFT's module."""
        general, numbers = without_numbers(module)
        layers = self._weights.num_layers
        return numbers.get("layer", layers) < layers and adapts(self._weights.mapping, general)
