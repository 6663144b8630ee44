"""Check of the teacher: it must have the policy's token ids, and a context for whole episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extensions.distill.extension import teacher_of
from asyncrl.launch.checks.model_files import check_same_tokens
from asyncrl.launch.prepare import Preparation
from asyncrl.models.architectures import flat

FIELD = "teacher.model"


def check(prepared: Preparation) -> None:
    """Check the teacher of a run whose models are known. Raises ConfigError."""
    if not {"model", "teacher"} <= prepared.hf.keys():
        return
    check_teacher(prepared.config, prepared.folders["model"], prepared.folders["teacher"])


def check_teacher(config: Config, model: Path, teacher: Path) -> None:
    """Refuse a teacher that cannot score the policy's episodes; both are HF folders. Only token ids are sent, so every
    id must mean the same token to both. Merges, templates and end-of-sequence ids may differ (a base model may be
    distilled from its instruct version)."""
    mine, its = _config(model), _config(teacher)
    check_same_tokens(FIELD, str(teacher_of(config).model), model, teacher, "take a teacher of the same family")
    for what, name, own, theirs in (
        ("vocabulary", "vocab_size", mine["vocab_size"], its["vocab_size"]),
        ("context", "max_position_embeddings", *_contexts(config, mine, its)),
    ):
        if theirs < own:
            remedy = f"Its {what} ({name} {theirs}) must not be smaller than the model's ({own}): take another teacher"
            more = ", or set engine.server_args.context_length." if what == "context" else "."
            raise ConfigError(FIELD, teacher_of(config).model, remedy + more)
    heads, degree = its["num_attention_heads"], teacher_of(config).tensor_parallel
    if teacher_of(config).started and heads % degree:
        raise ConfigError("teacher.tensor_parallel", degree, f"Must divide the teacher's {heads} attention heads.")


def _config(folder: Path) -> dict[str, Any]:
    """Return the config of the language model: engines serve more kinds of models than the trainer trains."""
    return flat(json.loads((folder / "config.json").read_text()))


def _contexts(config: Config, mine: dict[str, Any], its: dict[str, Any]) -> tuple[int, int]:
    """Return the context lengths of the policy's and the teacher's engines, in tokens."""
    own, other = (
        int(section.server_args.get("context_length") or hf["max_position_embeddings"])
        for section, hf in ((config.engine, mine), (teacher_of(config), its))
    )
    return own, other
