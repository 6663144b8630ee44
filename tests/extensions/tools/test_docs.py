"""The page about tools: its specifications are accepted, its question is played, its files are there."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.extensions.tools.env import ToolEnv
from asyncrl.extensions.tools.specs import source

PAGE = Path(__file__).parents[3] / "asyncrl/extensions/tools/README.md"
TEXT = PAGE.read_text()
EXAMPLES: list[dict[str, Any]] = [
    one for block in re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL) for one in yaml.safe_load(block)
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: one["use"])
def test_specification_is_accepted(example: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_TOKEN", "a key")
    source(example, "tools.0")


def test_every_kind_has_an_example() -> None:
    assert {one["use"] for one in EXAMPLES} >= {"python", "mcp"}
    assert {key for one in EXAMPLES if one["use"] == "mcp" for key in ("command", "url") if key in one} == {
        "command",
        "url",
    }


def test_options_of_the_environment_have_their_defaults() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| .* \| ([^|]+) \|$", TEXT.split("## The environment")[1], re.MULTILINE))
    parameters = inspect.signature(ToolEnv).parameters.values()
    options = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    assert told.keys() == options.keys()
    for name, default in options.items():
        found = told[name].strip().strip("`")
        assert found == (str(default).lower() if isinstance(default, bool | str) else f"{default:g}"), name


def test_examples_in_python_are_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        ast.parse("async def example():\n" + "".join(f"    {line}\n" for line in block.splitlines()))
