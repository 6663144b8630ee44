"""Check the questions of a run: python -m asyncrl.extensions.reach.questions MODEL_FOLDER OUT < config.json

`asyncrl-train --check` starts this as a process of its own, because it imports a tokenizer. It reads, renders and
counts the questions exactly as the rollout process does when it starts, and writes JSON lines to OUT: level, field,
value, remedy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.rollout.parts import ModelParts
from asyncrl.rollout.prompts import Prompts
from asyncrl.tasks.build import build_all

Told = tuple[str, str, str, str]
"""Level (ok, warning or error), setting, value and remedy."""


def look(config: Config, model: Path) -> Iterator[Told]:
    """Yield the number of questions of each task and evaluation set, or what is wrong with them."""
    left_out: list[str] = []
    try:
        played = build_all(config)
        parts = ModelParts.load(config, model)
        length = parts.hf["max_position_embeddings"]
        prompts = Prompts(config, played, parts.template, length, left_out.append, parts.images)
        first = {name: next(prompts.training[name]) for name in config.mixture}
    except ConfigError as error:
        yield "error", error.field, str(error.value), error.remedy
        return
    except AsyncRLError as error:
        yield "error", "task", str(error), "See the message."
        return
    for text in left_out:
        yield "warning", "rollout.overlong_prompts", text, "Shorten them, or lower rollout.max_new_tokens."
    for name in config.mixture | config.eval_sets:
        size = played[name].size
        count = "unlimited questions" if size is None else f"{size} questions"
        held = len(prompts.held_out.get(name, ()))
        begins = f"; the first one for training has {len(first[name].token_ids)} tokens" if name in first else ""
        yield "ok", config.field_of(name), f"{count}, {held} held out for evaluation{begins}", ""


if __name__ == "__main__":
    with Path(sys.argv[2]).open("w") as out:
        for told in look(Config.model_validate_json(sys.stdin.read()), Path(sys.argv[1])):
            out.write(f"{json.dumps(told)}\n")
