"""PEFT folders (https://huggingface.co/docs/peft): written from adapters by their HF names, and read without executing
pickles. An adapter changes a weight W to W + scale * B A; it is called by the name of its module, as in
`model.layers.0.self_attn.q_proj`, and its tensors A and B are `<module>.lora_A.weight` and `<module>.lora_B.weight`.

Experts that a folder stores as one tensor (see peft_config) are read and passed on one by one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.weights.bucket import plan_buckets
from asyncrl.weights.files import write_stream
from asyncrl.weights.names import FAMILIES
from asyncrl.weights.peft_config import CONFIG, DOWN, EXPERT, GATE_UP, PICKLE, TENSORS, read_adapter_config

PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<letter>[AB])\.weight")
Names = dict[str, str]
"""The tensors of one module by letter, A and B."""


def module_of(name: str) -> str:
    """Return the module of a tensor such as `model.layers.0.self_attn.q_proj.lora_A.weight`. Raises WeightsError."""
    found = _TENSOR.fullmatch(name.removeprefix(PREFIX))
    if found is None:
        raise WeightsError(
            f"{name} is not a linear layer's lora_A.weight or lora_B.weight. Adapters of embeddings, trained copies of "
            "modules and other methods are not supported: merge the adapter with PEFT."
        )
    return found["module"]


# --- writing ------------------------------------------------------------------------------------------------


def write_peft(target: Path, config: dict[str, Any], adapters: Iterable[tuple[str, Tensor]]) -> None:
    """Write a PEFT folder from (HF name, tensor). `config` is that of `user_config` or `engine_config`; the former asks
    for fused experts. The folder gets its name only when it is complete, and replaces one of that name.

    Raises WeightsError if the disk cannot take it.
    """
    building = target.with_name(target.name + ".partial")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    tensors = dict(adapters)
    if config.get("target_parameters"):
        tensors = dict(_fused(tensors))
    [bucket] = plan_buckets(((PREFIX + n, t.dtype, t.shape) for n, t in tensors.items()), 1 << 62)
    write_stream(building / TENSORS, bucket, ((e.name, tensors[e.name.removeprefix(PREFIX)]) for e in bucket))
    (building / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(building, target)


def _fused(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with the experts of a layer in one, named as PEFT nests its wrappers: gate_up_proj inside."""
    layers: dict[str, dict[tuple[str, str], dict[int, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        if found := EXPERT.match(module_of(name)):
            kind = next(kind for kind in ("gate", "up", "down") if found[kind])
            layers[found["layer"]][kind, _letter(name)][int(found["number"])] = tensor
        else:
            yield name, tensor
    for layer, parts in layers.items():
        stacks = {key: [of[number] for number in sorted(of)] for key, of in parts.items()}
        whole = f"{layer}{DOWN.rpartition('.')[0]}"
        if ("gate", "A") in stacks or ("up", "A") in stacks:
            gate_up = whole + ".base_layer" * (("down", "A") in stacks)
            yield from _named(gate_up, *(_gate_up(stacks, letter, whole) for letter in "AB"))
        if ("down", "A") in stacks:
            yield from _named(whole, stacks["down", "A"], stacks["down", "B"])


def _gate_up(stacks: dict[tuple[str, str], list[Tensor]], letter: str, whole: str) -> list[Tensor]:
    try:
        pairs = zip(stacks["gate", letter], stacks["up", letter], strict=True)
    except KeyError:
        raise WeightsError(
            f"{whole}: PEFT cannot express adapters on one of gate_proj and up_proj of experts. Name both in "
            "trainer.lora.targets."
        ) from None
    return [torch.cat(pair) if letter == "A" else torch.block_diag(*pair) for pair in pairs]


def _named(module: str, a: list[Tensor], b: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield f"{module}.lora_A.weight", torch.cat(a)
    yield f"{module}.lora_B.weight", torch.stack(b, -1).flatten(1)


# --- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a folder holds a module's adapter: alone in tensors A and B, or with those of the other experts of its
    layer. `half` is 0 for gate and 1 for up, if one adapter changes both."""

    names: Names
    key: str  # of ranks and scales
    experts: int = 1
    number: int = 0
    half: int | None = None


class PeftFolder:
    """The adapters of a PEFT folder, open inside the `with` block."""

    def __init__(self, folder: Path, architecture: str) -> None:
        """Read the configuration. Raises WeightsError or ConfigError for a folder that is not plain LoRA."""
        self.config = read_adapter_config(folder)
        self._folder, self._architecture = folder, architecture
        self._places: dict[str, _Place] = {}
        self._last: tuple[Names, tuple[Tensor, Tensor, bool]] | None = None

    def __enter__(self) -> Self:
        file = self._folder / TENSORS
        if (self._folder / PICKLE).exists() and not file.exists():
            raise WeightsError(
                f"{self._folder / PICKLE} is a pickle, which can run code, and is not read. If you trust it, load it "
                "with PEFT and save it with safe_serialization=True."
            )
        try:
            self._file = safe_open(file, framework="pt").__enter__()
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read: {error}. Copy or export it again.") from None
        modules: dict[str, Names] = defaultdict(dict)
        for name in self._file.keys():  # noqa: SIM118
            modules[module_of(name)][_letter(name)] = name
        for module, names in modules.items():
            self._places.update(self._located(module, names))
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    @property
    def modules(self) -> list[str]:
        """Return the modules that have an adapter, with each expert by itself."""
        return list(self._places)

    def scale(self, module: str) -> float:
        """Return the factor of a module's adapter."""
        return self.config.scale_of(self._places[module].key)

    def read(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of a module."""
        place = self._places[module]
        a, b, separate = self._stacked(place)
        if place.half is not None:
            b = b.chunk(2, 1)[place.half]
            if separate:
                a, b = a.chunk(2, 1)[place.half], b.chunk(2, 2)[place.half]
        return a[place.number], b[place.number]

    def _stacked(self, place: _Place) -> tuple[Tensor, Tensor, bool]:
        """Return A [experts, rank, in], B [experts, out, rank], and whether gate and up have an A each. Keeps the last
        ones, which the experts of a layer share."""
        if self._last is None or self._last[0] is not place.names:
            a, b = (self._file.get_tensor(place.names[letter]) for letter in "AB")
            a, b = a.unflatten(0, (place.experts, -1)), b.unflatten(1, (-1, place.experts)).movedim(2, 0)
            mixed = place.half is not None and any(b.chunk(2, 1)[i].chunk(2, 2)[1 - i].any() for i in (0, 1))
            self._last = place.names, (a, b, not mixed and a.shape[1] == 2 * self.config.rank)
        return self._last[1]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tensor) of all adapters."""
        for module in self._places:
            for letter, tensor in zip("AB", self.read(module), strict=True):
                yield f"{module}.lora_{letter}.weight", tensor

    def _located(self, module: str, names: Names) -> Iterator[tuple[str, _Place]]:
        """Yield the modules that these tensors belong to. Raises WeightsError if A and B do not fit."""
        experts = re.fullmatch(r"(.*\.)mlp\.experts(\.base_layer)?", module)
        if experts is None:
            self._check_rank(module, module, names)
            yield module, _Place(names, module)
            return
        whole = [name for name in (GATE_UP, DOWN) if any(name.endswith(target) for target in self.config.parameters)]
        if not whole or (len(whole) == 1 and experts[2]):
            raise WeightsError(f"{module} in {self._folder} has an adapter, but target_parameters does not name it")
        parameter = whole[0] if experts[2] else whole[-1]
        key = experts[1] + parameter
        count = self._check_rank(module, key, names)
        kinds = ("gate", "up") if parameter == GATE_UP else ("down",)
        for number in range(count):
            for half, kind in enumerate(kinds):
                name = experts[1] + _expert_name(self._architecture, kind).format(expert=number)
                yield name, _Place(names, key, count, number, half if len(kinds) == 2 else None)

    def _check_rank(self, module: str, key: str, names: Names) -> int:
        """Return the number of experts in the tensors of a module: 1, unless its key is that of a stack."""
        if missing := {"A", "B"} - names.keys():
            raise WeightsError(f"{module}.lora_{missing.pop()}.weight is missing in {self._folder}")
        a, b = (self._file.get_slice(names[letter]).get_shape() for letter in "AB")
        rank = self.config.rank_of(key)
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % rank or (key == module and a[0] != rank):
            raise WeightsError(
                f"{module} in {self._folder} has A {a} and B {b}, but {CONFIG} says rank {rank}. Copy or export the "
                "folder again."
            )
        return int(a[0]) // rank


def _letter(name: str) -> str:
    return name[-len("A.weight")]


def _expert_name(architecture: str, kind: str) -> str:
    """Return HF's name of an expert's linear within its layer, with a placeholder for the expert's number."""
    for rule in FAMILIES[architecture]:
        for name in rule.hf if rule.expert else ():
            found = EXPERT.match(name.removesuffix(".weight").replace("{expert}", "0"))
            if found and found[kind]:
                return name.removesuffix(".weight").removeprefix("model.layers.{layer}.")
    raise WeightsError(f"{architecture} has no routed experts, but the adapter has")
