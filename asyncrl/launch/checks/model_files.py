"""Check of a model folder: whether it is complete, and the names and shapes of its tensors, read from file headers
only. The safetensors library refuses a file that is shorter or longer than its header says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from asyncrl.errors import ConfigError
from asyncrl.launch.checks.findings import Finding, error, ok

INDEX = "model.safetensors.index.json"
TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
"""Each of these sets of files is a complete tokenizer."""
COPY = "Copy or download the folder again."
SHOWN = 3
"""Number of tokens that differ to show in the error."""


@dataclass
class ModelFiles:
    """Contents and problems of a model folder."""

    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the tensors by name."""
    nbytes: int = 0
    """Size of the files."""
    problems: list[Finding] = field(default_factory=list)


def read_model(folder: Path, name: str) -> ModelFiles:
    """Read a model folder. `name` is the setting that refers to it."""
    files = ModelFiles()
    if not _is_json(folder / "config.json"):
        files.problems.append(error(name, f"{folder}/config.json is missing or not valid JSON", COPY))
    if not any(all((folder / one).is_file() for one in some) for some in TOKENIZERS):
        wanted = " or ".join(" and ".join(some) for some in TOKENIZERS)
        files.problems.append(error(name, f"{folder} has no tokenizer ({wanted})", COPY))
    listed, named = _shards(folder, name, files.problems)
    found: set[str] = set()
    for shard in listed:
        found |= _read_shard(shard, name, files)
    if (missing := sorted(named - found)) and not files.problems:
        text = f"{len(missing)} tensors that {INDEX} lists are in no file, such as {missing[0]}"
        files.problems.append(error(name, text, COPY))
    return files


def check_model_files(folder: Path, files: ModelFiles, name: str) -> list[Finding]:
    """Return the problems of the folder, or one finding that it is complete."""
    if files.problems:
        return files.problems
    count = sum(map(math.prod, files.weights.values()))
    return [
        ok(
            name,
            f"{folder}: config, tokenizer, {len(files.weights)} tensors, {count:,} parameters, "
            f"{files.nbytes / 1e9:.3g} GB",
        )
    ]


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError):
        return False


def _shards(folder: Path, name: str, problems: list[Finding]) -> tuple[Sequence[Path], set[str]]:
    """Return the weight files, selected as in weights/folder.py, and the tensors listed by an index."""
    if not (folder / INDEX).is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            problems.append(error(name, f"{folder} holds no .safetensors file", "Convert the weights, or copy them."))
        return files, set()
    try:
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_bytes())["weight_map"]
        return [folder / file for file in sorted(set(weight_map.values()))], set(weight_map)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        problems.append(error(name, f"{folder / INDEX} cannot be read as an index", COPY))
        return [], set()


def _read_shard(path: Path, name: str, files: ModelFiles) -> set[str]:
    """Add the tensors of a file to `files`, and return their names."""
    try:
        with safe_open(path, framework="numpy") as shard:
            weights = {key: tuple(shard.get_slice(key).get_shape()) for key in shard.keys()}  # noqa: SIM118
    except OSError:
        files.problems.append(error(name, f"{path} is missing, or cannot be read", COPY))
        return set()
    except SafetensorError as failed:
        files.problems.append(error(name, f"{path} is no complete .safetensors file: {failed}", COPY))
        return set()
    files.weights |= weights
    files.nbytes += path.stat().st_size
    return set(weights)


def check_same_tokens(field: str, named: str, model: Path, other: Path, remedy: str) -> None:
    """Refuse the folder `other`, which the setting names, unless its token ids are those of `model`."""
    mine, its = (_tokens(folder) for folder in (model, other))
    if mine is None or its is None:
        folder = model if mine is None else other
        raise ConfigError(
            field, named, f"{folder} has no tokenizer.json, which is needed to compare the vocabularies: add it."
        )
    differing = sorted(number for number in mine.keys() | its.keys() if mine.get(number) != its.get(number))
    if differing:
        some = "; ".join(f"{n} is {mine.get(n)!r} and {its.get(n)!r}" for n in differing[:SHOWN])
        problem = f"Its tokenizer.json must have the vocabulary of {model}, but {len(differing)} token ids differ"
        raise ConfigError(field, named, f"{problem} ({some}): {remedy}.")


def _tokens(folder: Path) -> dict[int, str] | None:
    """Return the token of every id in tokenizer.json, including special tokens; None if there is no such file."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else [(one[0], i) for i, one in enumerate(vocabulary)]
    return {number: token for token, number in pairs} | {
        one["id"]: one["content"] for one in tokenizer.get("added_tokens", [])
    }
