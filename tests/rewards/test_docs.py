"""The page about rewards: each of its examples can be built, and no registered reward is without one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.rewards import build
from asyncrl.rewards.build import registered

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "rewards.md", *sorted((ROOT / "asyncrl" / "extensions").glob("*/README.md"))]
TEXT = "\n".join(page.read_text() for page in PAGES)
BLOCKS = [block for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) if "use:" in block]
EXAMPLES: list[dict[str, Any]] = [  # without those of an extension that was deleted
    yaml.safe_load(block) for block in BLOCKS if {*re.findall(r"use: ([a-z]+)\b", block)} <= {*registered()}
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one["use"])
def test_example_can_be_built(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    assert build(example["use"], example["params"]).inline in (True, False)


def test_every_registered_reward_has_an_example_or_a_sentence() -> None:
    shown = {example["use"] for example in EXAMPLES}
    assert {name for name in registered() if name not in shown and f"`{name}` " not in TEXT} == set()
    assert "number" in shown
