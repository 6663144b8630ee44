"""Mapping between Megatron parameters and HF tensors, in both directions, from the tables of models/families.

Megatron's names are those of megatron-core's local layer spec, and TRANSFORMER_ENGINE translates those of its other
one; HF's are those of the safetensors files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from asyncrl.errors import WeightsError
from asyncrl.models.families import known_families
from asyncrl.models.family import WeightRow
from asyncrl.weights.layouts import LAYOUTS, WHOLE, NameRule

Table = tuple[NameRule, ...]


def table(weights: Iterable[WeightRow]) -> Table:
    """Return the rules of a family's weights."""
    return tuple(NameRule(one.megatron, LAYOUTS[one.layout], one.hf) for one in weights)


@cache
def tables() -> dict[str, Table]:
    """Return the rules of all families, by architecture."""
    return {name: table(family.weights) for name, family in known_families().items()}


TRANSFORMER_ENGINE: tuple[tuple[str, str], ...] = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"linear_(q|kv)_up_proj\.layer_norm_weight$", r"\1_layernorm.weight"),
    (r"experts\.(linear_fc[12])\.weight(\d+)$", r"experts.local_experts.\2.\1.weight"),
)
"""Names under Megatron's TransformerEngine spec, which fuses norms into the linear layers that follow them and keeps
all experts of a rank in one module, and the same parameters under the local spec. All other names are equal."""
WHOLE_WITH_TRANSFORMER_ENGINE = re.compile(r"linear_(q|kv)_down_proj\.weight$")
"""Parameters that every tensor-parallel rank holds in full under the TransformerEngine spec, and shares under the local
one."""


def local_name(name: str) -> str:
    """Return the name under Megatron's local spec of a parameter of its TransformerEngine spec."""
    for pattern, replacement in TRANSFORMER_ENGINE:
        name = re.sub(pattern, replacement, name)
    return name


class Mapping:
    """The table of one architecture, looked up by Megatron name or by HF name. With `transformer_engine`, parameters
    have the layouts of Megatron's TransformerEngine spec."""

    def __init__(self, architecture: str, *, transformer_engine: bool = False) -> None:
        self._transformer_engine = transformer_engine
        if architecture not in tables():
            raise WeightsError(f"{architecture}: no table of names for this architecture; known: {sorted(tables())}")
        self.architecture = architecture
        self._rules = {rule.megatron: rule for rule in tables()[architecture]}
        self._hf = {name: rule for rule in tables()[architecture] for name in rule.hf}
        tower = known_families()[architecture].tower
        self.tower = tower and tower.prefix

    def find(self, megatron_name: str) -> NameRule:
        """Return the rule of a parameter, named as in the local spec, whose layer and expert numbers are global."""
        if self.tower and megatron_name.startswith("visual."):  # transformers' own module, equal on all ranks
            name = self.tower + megatron_name.removeprefix("visual.")
            return NameRule(megatron_name, WHOLE, (name,))
        general, numbers = without_numbers(megatron_name)
        if general not in self._rules:
            raise WeightsError(f"{megatron_name}: {self.architecture}'s table has no rule for this Megatron parameter")
        rule = self._rules[general]
        if self._transformer_engine and WHOLE_WITH_TRANSFORMER_ENGINE.search(general):
            rule = replace(rule, layout=WHOLE)
        return replace(rule, layer=numbers.get("layer"), expert=numbers.get("expert"))

    def knows(self, hf_name: str) -> bool:
        """Return whether some Megatron parameter or the vision tower holds this HF tensor."""
        if self.tower and hf_name.startswith(self.tower):
            return True
        return without_numbers(hf_name)[0] in self._hf

    def is_linear(self, hf_name: str) -> bool:
        """Return whether an HF tensor is the weight of a linear layer, which can be quantized."""
        rule = self._hf.get(without_numbers(hf_name)[0])
        return rule is not None and rule.linear


def without_numbers(name: str) -> tuple[str, dict[str, int]]:
    """Return a name of Megatron's or HF's with placeholders for the numbers of its layer, block and expert, and these
    numbers."""
    numbers: dict[str, int] = {}

    def replaced(found: re.Match[str]) -> str:
        numbers[found["kind"]] = int(found["number"])
        return f"{found['name']}.{{{found['kind']}}}"

    return re.sub(r"\b(?P<name>(local_)?(?P<kind>layer|block|expert)s)\.(?P<number>\d+)(?=\.)", replaced, name), numbers
