"""Code that blocks the event loop is named with its file and line, once; what awaits, and what is ours, never."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.observe import blocking
from asyncrl.extensions.observe.blocking import BlockWatch
from asyncrl.user_code import load

AGENT = """
import asyncio, time

def wait(until):
    while not until():
        time.sleep(0.01)

async def fetch(until):
    wait(until)

async def polite(until):
    while not until():
        await asyncio.sleep(0.01)

async def brief(until):
    while not until():
        time.sleep(0.005)
        await asyncio.sleep(0)

async def asks(generate):
    await generate()
"""
OURS = "import time\nasync def generate():\n    time.sleep(0.3)\n"
DEADLINE = 60.0


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Functions of a user's module, while every block of 50 ms counts."""
    monkeypatch.setattr(blocking, "LONG", 0.05)
    monkeypatch.setattr(blocking, "EVERY", 0.01)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "blocking_agent.py").write_text(AGENT)
    return lambda name: load(f"blocking_agent:{name}", "agent")


async def watched(function: Callable[[list[str]], Any], times: int = 1) -> list[str]:
    """Warnings of a loop in which this runs so often; it is called with those so far."""
    warnings: list[str] = []
    watch = BlockWatch(lambda text, traceback=None: warnings.append(text))
    try:
        for _ in range(times):
            await asyncio.sleep(0)
            await function(warnings)
    finally:
        watch.close()
    return warnings


def test_code_that_blocks_is_named_once_with_its_line(agent: Callable[[str], Any], tmp_path: Path) -> None:
    async def blocked(warnings: list[str]) -> None:
        end = time.monotonic() + (0.3 if warnings else DEADLINE)
        known = len(warnings)
        await agent("fetch")(lambda: len(warnings) > known or time.monotonic() > end)

    (warning,) = asyncio.run(watched(blocked, times=2))
    assert "the event loop has stood still for" in warning
    assert f"{tmp_path}/blocking_agent.py:6, in wait: await an asynchronous client" in warning


@pytest.mark.parametrize("name", ["polite", "brief"])
def test_code_that_awaits_is_not_named(name: str, agent: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def awaits(_: list[str]) -> None:
        end = time.monotonic() + 0.3
        await agent(name)(lambda: time.monotonic() > end)

    monkeypatch.setattr(blocking, "LONG", 0.05 if name == "polite" else DEADLINE)
    assert asyncio.run(watched(awaits)) == []


def test_what_is_ours_is_not_named(agent: Callable[[str], Any]) -> None:
    async def asks(_: list[str]) -> None:
        ours: dict[str, Any] = {}
        exec(compile(OURS, f"{blocking.PACKAGE}generate.py", "exec"), ours)
        await agent("asks")(ours["generate"])

    assert asyncio.run(watched(asks)) == []


def test_code_that_only_one_look_has_seen_is_not_named(
    agent: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = [(None for _ in "a"), (None for _ in "b")]
    looks = itertools.cycle(function.gi_frame for function in functions)
    monkeypatch.setattr(blocking, "_of_user", lambda frame: next(looks))

    async def blocks(_: list[str]) -> None:
        time.sleep(0.3)  # noqa: ASYNC251

    assert asyncio.run(watched(blocks)) == []
