"""Tasks of the fake worker and of the real one, and what plays them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.verifiers import envs
from asyncrl.extensions.verifiers.process import Launch
from asyncrl.extensions.verifiers.task import Verifiers
from asyncrl.schema import Completion, Prompt, Trajectory
from asyncrl.tasks.build import build
from tests.agents.talking import Talking, written
from tests.extensions.proxy.behind import DEADLINE, EOS_ID, template
from tests.fakes import tiny_config

FAKE = Path(__file__).with_name("fake_worker.py")
VENV = "toy_digits"
INSTALL = f"asyncrl-envs install {VENV} --from {Path(__file__).with_name('environments')}"
real = pytest.mark.skipif(not envs.folder(VENV).exists(), reason=f"verifiers is not installed: {INSTALL}")


def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake worker play."""
    monkeypatch.setattr(Launch, "argv", lambda self: [sys.executable, str(FAKE)])


def section(name: str, **params: Any) -> Any:
    """Return the settings of a task."""
    return tiny_config(**{"task.kind": "verifiers", "task.name": name, "task.params": params}).task


def fake(names: Sequence[str], **taskset: Any) -> Verifiers:
    """Return a task of the fake worker."""
    return _built(section("fake", args={"taskset": {"tasks": list(names), **taskset}}))


def made_of(environment: Sequence[str] = (), **taskset: Any) -> Verifiers:
    """Return a task of the fake worker, to which these variables are given."""
    return _built(section("fake", args={"taskset": taskset}, environment=environment))


def made(name: str, **args: Any) -> Verifiers:
    """Return a task of the real worker."""
    return _built(section(name, venv=VENV, args=args))


def _built(config: Any) -> Verifiers:
    task = build(config)
    assert isinstance(task, Verifiers)
    return task


def digits() -> Iterator[Completion]:
    """Answer 1, for ever."""
    while True:
        yield written(1, EOS_ID)


Ended = Trajectory | EpisodeFailed


async def episode(task: Verifiers, number: int, generate: Any = None) -> Ended:
    """Return the trajectory of one episode, or its failure."""
    question = task.question(number)
    prompt = Prompt("p", template().begin(question["messages"]), question, "t", number)
    try:
        async with asyncio.timeout(DEADLINE):
            return await task.agent.run(prompt, generate or Talking(digits(), template()))
    except EpisodeFailed as failed:
        return failed


def play(task: Verifiers, act: Callable[[], Any]) -> Any:
    """Start the task's agent, act, and close it."""

    async def main() -> Any:
        try:
            await task.agent.start()
            return await act()
        finally:
            await task.agent.close()

    return asyncio.run(main())


def outcome(ended: Ended) -> tuple[Any, ...]:
    """Return the reward of an episode, or the reason of its failure and whether it is retried."""
    return (ended.reason, ended.retry) if isinstance(ended, EpisodeFailed) else (ended.reward,)
