"""Check of the teacher: it must have the policy's token ids, and a context for whole episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.models.vision import flat

FIELD = "teacher.model"
NAMED = 3
"""Number of differing tokens to show in the error."""


def check_teacher(config: Config, model: Path, teacher: Path) -> None:
    """Refuse a teacher that cannot score the policy's episodes; both are HF folders. Only token ids are sent, so every
    id must mean the same token to both. Merges, templates and end-of-sequence ids may differ (a base model may be
    distilled from its instruct version)."""
    mine, its = _config(model), _config(teacher)
    check_same_tokens(FIELD, str(config.teacher.model), model, teacher, "take a teacher of the same family")
    for what, name, own, theirs in (
        ("vocabulary", "vocab_size", mine["vocab_size"], its["vocab_size"]),
        ("context", "max_position_embeddings", *_contexts(config, mine, its)),
    ):
        if theirs < own:
            remedy = f"Its {what} ({name} {theirs}) must not be smaller than the model's ({own}): take another teacher"
            more = ", or set engine.server_args.context_length." if what == "context" else "."
            raise ConfigError(FIELD, config.teacher.model, remedy + more)
    heads, degree = its["num_attention_heads"], config.teacher.tensor_parallel
    if config.teacher.started and heads % degree:
        raise ConfigError("teacher.tensor_parallel", degree, f"Must divide the teacher's {heads} attention heads.")


def _config(folder: Path) -> dict[str, Any]:
    """Return the config of the language model: engines serve more kinds of models than the trainer trains."""
    return flat(json.loads((folder / "config.json").read_text()))


def _contexts(config: Config, mine: dict[str, Any], its: dict[str, Any]) -> tuple[int, int]:
    """Return the context lengths of the policy's and the teacher's engines, in tokens."""
    own, other = (
        int(section.server_args.get("context_length") or hf["max_position_embeddings"])
        for section, hf in ((config.engine, mine), (config.teacher, its))
    )
    return own, other


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
        some = "; ".join(f"{n} is {mine.get(n)!r} and {its.get(n)!r}" for n in differing[:NAMED])
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
