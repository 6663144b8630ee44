"""The parameters of a model, derived from its HF config, and their places in a Megatron checkpoint.

A checkpoint's keys are those that `GPTModel.sharded_state_dict()` of megatron-core's local layer spec requests. Layers
are stacked under one key, unless a list says which of them have experts: then every layer has keys of its own. Routed
experts are stacked in both cases. A tensor in a checkpoint is complete, as with tensor parallelism of degree 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from asyncrl.errors import ConfigError, WeightsError
from asyncrl.extensions.lora.weights import matrix_rule, module_of, projections
from asyncrl.models import families, parts
from asyncrl.models.architectures import megatron_arguments
from asyncrl.schema import POLICY
from asyncrl.weights.layouts import NameRule
from asyncrl.weights.mapping import Table, tables

Arguments = dict[str, Any]

MTP_NAMES = frozenset(weight.megatron for weight in parts.MTP)
FUSED_NORMS = {  # stored under the names of TransformerEngine's fused linears
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class Address:
    """A parameter's place: `tensor[index]` of the stacked tensor `key`, whose leading sizes are `counts`."""

    key: str
    index: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One Megatron parameter of the whole model, and its places in order of preference: a writer uses the first."""

    name: str
    found: NameRule
    addresses: tuple[Address, ...]


class Structure:
    """The parameters of the model that an HF config describes.

    Raises WeightsError for an architecture without a table, or for a config that lacks a required field.
    """

    def __init__(self, hf: dict[str, Any], *, drafts: bool = True) -> None:
        """`drafts` says whether its layers of multi-token prediction belong to it."""
        architecture = (hf.get("architectures") or ["none named"])[0]
        if architecture not in tables():
            known = ", ".join(sorted(tables()))
            raise WeightsError(f"architecture {architecture} cannot be converted; known: {known}")
        family = families.known_families()[architecture]
        if family.tower:
            raise WeightsError(
                f"{architecture} cannot be converted: checkpoints do not hold a frozen vision tower. Let a run write "
                "the HF folder (trainer.save_hf_every), or merge its PEFT folder"
            )
        self._table: Table = tables()[architecture]
        self._weights = {one.megatron: one for one in family.weights}
        try:
            self._arguments = megatron_arguments(hf)
            self._layers: int = hf["num_hidden_layers"]
        except ConfigError as error:
            raise WeightsError(f"config.json has {error.value}") from None
        except KeyError as error:
            raise WeightsError(f"config.json has no {error.args[0]}") from None
        knows = any(rule.megatron in MTP_NAMES for rule in self._table)
        self.drafts: int = (hf.get("num_nextn_predict_layers") or 0) if drafts and knows else 0
        self._tied = bool(hf.get("tie_word_embeddings", False))

    def __iter__(self) -> Iterator[Parameter]:
        """Yield the embedding, the layers from first to last, and what follows them."""
        by_layer = [rule for rule in self._table if "{layer}" in rule.megatron]
        others = [rule for rule in self._table if rule not in by_layer]
        for rule in others:
            if rule.megatron.startswith("embedding."):
                yield self._parameter(rule, None, None)
        experts: int = self._arguments.get("num_moe_experts", 0)
        for layer in range(self._layers + self.drafts):
            for rule in by_layer:
                if self._has(rule, layer):
                    for expert in range(experts) if rule.routed else (None,):
                        yield self._parameter(rule, layer, expert)
        for rule in others:
            if not rule.megatron.startswith("embedding.") and not (
                self._tied and rule.megatron == "output_layer.weight"
            ):
                yield self._parameter(rule, None, None)

    def adapters(self, adapter: str = POLICY) -> Iterator[Parameter]:
        """Yield the matrices of an adapter that each linear layer may have."""
        for parameter in self:
            rule, layer, expert = parameter.found, parameter.found.layer, parameter.found.expert
            if layer is None or layer >= self._layers or not rule.linear:
                continue
            for projection in projections(rule):
                for matrix in "AB":
                    of_layer = matrix_rule(rule, projection, matrix, module=module_of(adapter))
                    yield self._parameter(of_layer, layer, expert)

    def _has(self, rule: NameRule, layer: int) -> bool:
        drafts = layer >= self._layers  # all of them have experts
        if rule.megatron in MTP_NAMES:
            return drafts
        sparse = drafts or self._arguments.get("moe_layer_freq", [0] * self._layers)[layer]
        return self._weights[rule.megatron].present(self._arguments, "sparse" if sparse else "dense")

    def _parameter(self, rule: NameRule, layer: int | None, expert: int | None) -> Parameter:
        name = rule.megatron.format(layer=layer, expert=expert)
        return Parameter(
            name, replace(rule, layer=layer, expert=expert), tuple(self._addresses(rule.megatron, layer, expert))
        )

    def _addresses(self, name: str, layer: int | None, expert: int | None) -> Iterator[Address]:
        """Yield the trainer's own place first, then those in checkpoints of other layer specs."""
        if layer is None:
            yield Address(name, (), ())
            return
        drafts = layer - self._layers
        if drafts >= 0:
            part = "" if name in MTP_NAMES else "transformer_layer."
            name = name.replace("decoder.layers.{layer}.", f"mtp.layers.{drafts}.{part}")
        index, counts = ((), ()) if expert is None else ((expert,), (self._arguments["num_moe_experts"],))
        stackings = (False,) if drafts >= 0 else (True, False)
        for stacked in reversed(stackings) if "moe_layer_freq" in self._arguments else stackings:
            general = name.replace("layers.{layer}", "layers" if stacked else f"layers.{layer}")
            general = general.replace("local_experts.{expert}", "experts")
            place = ((layer, *index), (self._layers, *counts)) if stacked else (index, counts)
            for key in self._spellings(general):
                yield Address(key, *place)

    def _spellings(self, key: str) -> Iterator[str]:
        fused = key
        for plain, other in FUSED_NORMS.items():
            if key.endswith(f".{plain}"):
                fused = key.removesuffix(plain) + other
        yield from dict.fromkeys((key, fused) if self._arguments.get("multi_latent_attention") else (fused, key))
