"""Conversions of adapters: PEFT folders into the weights of their base model, and from and to checkpoints."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import regex
import torch
from torch import Tensor

from asyncrl.checkpoints import manifest
from asyncrl.config.lora import LoraConfig
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.extensions.convert import bridge
from asyncrl.extensions.convert.bridge import COMPANIONS, progress, write_hf
from asyncrl.extensions.convert.checkpoint import CheckpointReader, CheckpointWriter
from asyncrl.extensions.convert.folders import building, copy_companions, read_config
from asyncrl.extensions.convert.parameters import Structure
from asyncrl.extensions.lora.peft import read_peft, write_peft
from asyncrl.extensions.lora.peft_config import (
    CONFIG,
    DOWN,
    GATE_UP,
    INSIDE,
    adapter_folders,
    parsed,
    positive,
    read_adapter_config,
    user_config,
)
from asyncrl.extensions.lora.weights import ADAPTER, adapter_of, of_expert
from asyncrl.models import catalog
from asyncrl.models.families import choosing_biases
from asyncrl.weights.folder import HFFolder
from asyncrl.weights.layouts import dims_of, stack_experts

MATCH_SECONDS = 2.0

EXPERT_WEIGHT = re.compile(
    r"(?P<layer>.*\.)(?:mlp|block_sparse_moe)\.experts\.(?P<number>\d+)\."
    r"(?:(?P<gate>gate_proj|w1)|up_proj|w3|(?P<down>down_proj|w2))\.weight"
)
"""An expert's weight in the files of a model."""


def merge(base: Path, adapter: Path, out: Path, *, limit: int, dtype: torch.dtype | None = None) -> None:
    """Write the HF folder of a model with an adapter in its weights. They are computed in float32, one at a time, and
    keep their dtype unless one is given. `limit` is the size of a file in bytes.

    Raises WeightsError or ConfigError if the adapter is not of this model, or not plain LoRA.
    """
    hf = read_config(base)
    if "quantization_config" in hf:
        raise WeightsError(f"the weights of {base} are quantized: give the model that they were made from")
    adapters = PeftFolder(adapter)
    with HFFolder(base) as weights:
        names = weights.names()
        unknown = set(adapters.modules) - {_module_of_weight(adapters, name) for name in names}
        if hf.get("tie_word_embeddings"):
            unknown |= {"lm_head"} & set(adapters.modules)  # its weight is also that of the embedding
        if unknown:
            raise WeightsError(
                f"{adapter} changes {min(unknown)}, which {base} does not have by itself: give the model that the "
                "adapter was trained on"
            )

        def stream(*, values: bool) -> Iterator[tuple[str, Tensor]]:
            for name in names:
                weight = weights.read(name) if values else weights.described(name)
                kept = weight.dtype if dtype is None or name.endswith(choosing_biases()) else dtype  # as in to-hf
                if values and _module_of_weight(adapters, name):
                    weight = weight.float() + _delta(adapters, name, weight.shape)
                yield name, weight.to(kept)

        write_hf(out, base, dtype, stream(values=False), stream(values=True), limit)


class PeftFolder:
    """The adapters of a PEFT folder, which may have several ranks and scales."""

    def __init__(self, folder: Path) -> None:
        """Read the folder. Raises WeightsError or ConfigError if it is not plain LoRA."""
        self.folder = folder
        self._config = read_adapter_config(folder)
        for field, kind in (("rank_pattern", int), ("alpha_pattern", int | float)):
            _check_pattern(folder / CONFIG, field, getattr(self._config, field), kind)
        self.tensors = read_peft(folder)
        self.modules = list(dict.fromkeys(parsed(name)[0] for name in self.tensors))
        for module in self.modules:
            held, rank = len(self.tensors[f"{module}.lora_A.weight"]), self.rank_of(module)
            if held % rank if module.endswith((GATE_UP, DOWN)) else held != rank:
                raise WeightsError(
                    f"the adapter of {module} in {folder} has rank {held}, but {CONFIG} says {rank}. Copy or export "
                    "the folder again."
                )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return int(_matching(self._config.rank_pattern, module, self._config.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's adapter."""
        alpha = _matching(self._config.alpha_pattern, module, self._config.alpha)
        return dataclasses.replace(self._config, rank=self.rank_of(module), alpha=alpha).scale


def _check_pattern(file: Path, field: str, patterns: dict[str, Any], kind: Any) -> None:
    for pattern, value in patterns.items():
        positive(file, f"{field}: {pattern}", value, kind)
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{file}: {field}", pattern, f"It is no regular expression: {error}.") from None


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT does. Raises WeightsError
    for one that takes longer than MATCH_SECONDS: the patterns of a folder may be a stranger's."""
    for key, value in patterns.items():
        try:
            if regex.match(rf"(.*\.)?({key})$", module, timeout=MATCH_SECONDS):
                return value
        except TimeoutError:
            raise WeightsError(
                f"{CONFIG}: the pattern {key!r:.200} was not matched with {module} within {MATCH_SECONDS:g} s: write "
                "the names of modules instead"
            ) from None
    return default


def _module_of_weight(adapters: PeftFolder, weight: str) -> str | None:
    """Return the module whose adapter changes a weight of the model, if there is one."""
    expert = EXPERT_WEIGHT.fullmatch(weight)
    stacked = expert["layer"] + (DOWN if expert["down"] else GATE_UP) if expert else None
    module = weight.removesuffix(".weight")
    inside = module.replace("model.", f"model{INSIDE}", 1)  # files of Qwen2.5-VL do not name the model inside
    shared = module.replace(".shared_mlp.", ".shared_experts.")  # files of Hunyuan 3
    return next((name for name in (module, stacked, inside, shared) if name in adapters.modules), None)


def _delta(adapters: PeftFolder, weight: str, shape: Sequence[int]) -> Tensor:
    """Return scale * B A of a weight that an adapter changes, in float32. Raises WeightsError if the weight has another
    shape."""
    module = _module_of_weight(adapters, weight)
    assert module is not None
    a, b = (adapters.tensors[f"{module}.lora_{letter}.weight"] for letter in "AB")
    expert, count = EXPERT_WEIGHT.fullmatch(weight), len(a) // adapters.rank_of(module)
    if expert and module.endswith((GATE_UP, DOWN)):
        a, b = (of_expert(one, letter, int(expert["number"]), count) for one, letter in ((a, "A"), (b, "B")))
        b = b if expert["down"] else b.chunk(2)[0 if expert["gate"] else 1]
    stacked = weight.endswith((GATE_UP, DOWN))
    fits = (count, a.shape[1], len(b)) if stacked else (len(b), a.shape[1])  # stacks hold matrices transposed
    if fits != tuple(shape):
        raise WeightsError(
            f"the adapter of {module} in {adapters.folder} is for a weight of shape {fits}, but {weight} is "
            f"{tuple(shape)}. Give the model that the adapter was trained on."
        )
    a, b, scale = a.float(), b.float(), adapters.scale_of(module)
    if not stacked:
        return scale * (b @ a)
    return scale * torch.stack([(of_expert(b, "B", n, count) @ of_expert(a, "A", n, count)).t() for n in range(count)])


def checkpoint_to_hf(source: Path, out: Path, *, model: Path | None, dtype: torch.dtype | None, limit: int) -> None:
    """Write the HF folder of a checkpoint, which may hold adapters in place of all weights. `model` replaces the model
    folder that it names."""
    if any(ADAPTER.fullmatch(key) for key in CheckpointReader(chunks(source)).model_keys):
        to_hf(source, out, model=model, dtype=dtype, limit=limit)
    else:
        bridge.to_hf(chunks(source), out, model=model or model_of_run(source), dtype=dtype, limit=limit)


def to_peft(source: Path, out: Path, *, model: Path | None) -> None:
    """Write the adapters of a checkpoint as a PEFT folder, or as one for each of several adapters (agents.roles) below
    it. The checkpoint is that of a run, or was written by `from_peft`; `model` replaces the base model that it names.

    Raises RecordError or WeightsError for a checkpoint that does not fit.
    """
    folder = chunks(source)
    written = folder / COMPANIONS
    if given := (written / CONFIG).is_file():
        base = model or written
    else:
        base, lora, _ = _of_run(folder, model)
    found = _adapters(folder, base)
    with building(out) as partial:
        for name, target in adapter_folders(partial, list(found)).items():
            config = json.loads((written / CONFIG).read_text()) if given else user_config(lora, found[name], str(base))
            write_peft(target, config, found[name].items())


def to_hf(source: Path, out: Path, *, model: Path | None, dtype: torch.dtype | None, limit: int) -> None:
    """Write the HF folder of a run's base model with the adapters of a checkpoint in its weights. Raises WeightsError
    if the base is not the one that the run had."""
    base, lora, digest = _of_run(chunks(source), model)
    if lora.base != "none":
        raise WeightsError(
            f"{source} was trained on a base in {lora.base}: use to-peft, and merge it into weights of your choice, or "
            "export the model from the run with trainer.lora.save_merged"
        )
    with HFFolder(base) as weights:
        if digest and (found := weights.digest()) != digest:
            raise WeightsError(
                f"the adapters of {source} belong to a base with the hash {digest}, but {base} has {found}: give that "
                "base with --model"
            )
    if len(names := _names(chunks(source))) > 1:
        raise WeightsError(
            f"{source} has the adapters {', '.join(names)}: use to-peft, and merge the one that you want"
        )
    with tempfile.TemporaryDirectory() as folder:
        to_peft(source, Path(folder) / "adapter", model=base)
        merge(base, Path(folder) / "adapter", out, limit=limit, dtype=dtype)


def from_peft(source: Path, out: Path, *, model: Path, limit: int) -> None:
    """Write the adapters of a PEFT folder as a checkpoint, under the keys of the trainer's model. Config and tokenizer
    come from the folder of the base model.

    Raises WeightsError or ConfigError if the adapters are not of this model, or not plain LoRA.
    """
    hf = read_config(model)
    structure, dims = Structure(hf), dims_of(hf)
    adapters = PeftFolder(source)
    with building(out) as folder, CheckpointWriter(folder, limit, progress()) as writer:
        projections = {module.rpartition(".")[2] for module in adapters.modules}
        left = set(adapters.modules)
        for parameter in structure.adapters():
            (name,) = parameter.found.hf_names()
            module, letter = parsed(name)
            if module.rpartition(".")[2] not in projections:
                continue
            if name not in adapters.tensors:
                raise WeightsError(f"{name} is missing in {source}")
            tensor, expert = adapters.tensors[name], parameter.found.expert
            if expert is not None:
                tensor = of_expert(tensor, letter, expert, parameter.addresses[0].counts[-1])
            writer.add(parameter, parameter.found.layout.shard([tensor], 1, 0, dims))
            left.discard(module)
        if left:
            raise WeightsError(f"{source} adapts {min(left)}, which is no linear layer that is trained in {model}")
        copy_companions(model, folder / COMPANIONS, {})
        shutil.copyfile(source / CONFIG, folder / COMPANIONS / CONFIG)
        writer.finish()


def chunks(source: Path) -> Path:
    """Return the folder of a network, given that or the checkpoint of a run."""
    return source / "policy" if (source / manifest.NAME).is_file() else source


def model_of_run(source: Path) -> Path | None:
    """Return the model folder of the run whose checkpoint, or network of one, this is; None for other folders."""
    folder = chunks(source).parent
    if not (folder / manifest.NAME).is_file():
        return None
    return catalog.resolve(manifest.read(folder).config["model"]["path"], "--model")


def _of_run(folder: Path, model: Path | None) -> tuple[Path, LoraConfig, str | None]:
    """Return the base model of a run's checkpoint, its settings of adapters and the hash of the base."""
    found = manifest.read(folder.parent)
    lora = LoraConfig.model_validate(found.config["trainer"]["lora"])
    return model or catalog.resolve(found.config["model"]["path"], "--model"), lora, found.base


def _names(folder: Path) -> list[str]:
    """Return the names of a checkpoint's adapters in order. Raises WeightsError if it has none."""
    found = {name for key in CheckpointReader(folder).model_keys if (name := adapter_of(key))}
    if not found:
        raise WeightsError(f"{folder} holds no adapters: use to-hf")
    return sorted(found)


def _adapters(folder: Path, model: Path) -> dict[str, dict[str, Tensor]]:
    """Read each adapter of a checkpoint by HF names, with the matrices of a layer's experts in one."""
    hf = read_config(model)
    checkpoint, structure, dims = CheckpointReader(folder), Structure(hf), dims_of(hf)
    found, used = {}, set[str]()
    for adapter in _names(folder):
        parts: dict[str, list[Tensor]] = defaultdict(list)
        for parameter in structure.adapters(adapter):
            if any(address.key in checkpoint.model_keys for address in parameter.addresses):
                address = checkpoint.locate(parameter)
                (whole,) = parameter.found.layout.join([checkpoint.read(address)], dims)
                parts[parameter.found.hf_names()[0]].append(whole.tensor())
                used.add(address.key)
        found[adapter] = {
            name: tensors[0] if len(tensors) == 1 else stack_experts(parsed(name)[1], tensors)
            for name, tensors in parts.items()
        }
    if left := {key for key in checkpoint.model_keys if ADAPTER.fullmatch(key)} - used:
        raise WeightsError(f"{folder} has an adapter that {model} has no place for: {min(left)}")
    return found
