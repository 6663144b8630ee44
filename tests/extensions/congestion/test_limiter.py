"""Groups start as the window allows, and the window follows what engines and machine report."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.loads import Load
from asyncrl.errors import EngineError
from asyncrl.extensions.congestion import limiter as module
from asyncrl.extensions.congestion.extension import Congestion
from asyncrl.extensions.congestion.limiter import AdaptiveConcurrency
from asyncrl.extensions.congestion.window import ConcurrencyWindow
from asyncrl.models import catalog
from asyncrl.network.addresses import Addresses
from asyncrl.rollout.build import RolloutParts, _limiter, _started_hooks
from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.limiter import FixedConcurrency
from asyncrl.rollout.parts import allow_files
from asyncrl.rollout.reporters import RolloutRun
from tests.fakes import addresses, tiny_config, until
from tests.rollout.working import done, started

IDLE = Load(0, 0, 0, 1000, 0, 0)


def in_adaptive_room(
    play: Callable[[AdaptiveConcurrency], Awaitable[None]],
    ask: Callable[[], Awaitable[list[Load]]],
    *,
    holding: bool = False,
) -> None:
    async def main() -> None:
        limiter = AdaptiveConcurrency(ConcurrencyWindow(longest=100))
        watching = asyncio.ensure_future(limiter.watch(ask, lambda: 0.0, lambda: holding))
        try:
            await play(limiter)
        finally:
            watching.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


async def idle() -> list[Load]:
    return [IDLE]


def test_machine_is_watched_though_engines_report_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.0)
    seen: list[float] = []

    class Noting(ConcurrencyWindow):
        def observe_machine(self, cores: int, load: float, free: float) -> None:
            seen.append(load)

    async def broken() -> list[Load]:
        raise EngineError("no /get_load")

    async def main() -> None:
        limiter = AdaptiveConcurrency(Noting(longest=100), programs=True)
        watching = asyncio.ensure_future(limiter.watch(broken, lambda: 0.0, lambda: False))
        await until(lambda: len(seen) > 3)
        watching.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_as_many_start_as_fit_and_the_next_at_an_end() -> None:
    async def play(limiter: AdaptiveConcurrency) -> None:
        tasks = await started(limiter, 10)
        assert done(tasks) == 2  # 10 episodes of 100 tokens fit, groups have 4
        limiter.release(4)
        await until(lambda: done(tasks) > 2)
        limiter.give_back(2)
        assert limiter.window.in_play == 4 * done(tasks) - 6
        [task.cancel() for task in tasks]

    in_adaptive_room(play, idle)


def test_no_second_group_starts_before_the_engines_were_asked() -> None:
    async def play(limiter: AdaptiveConcurrency) -> None:
        tasks = await started(limiter, 3)
        assert done(tasks) == 1
        [task.cancel() for task in tasks]

    async def silent() -> list[Load]:
        return []

    in_adaptive_room(play, silent)
    in_adaptive_room(play, idle, holding=True)


def test_silent_engines_leave_the_decision_to_the_buffer(capsys: pytest.CaptureFixture[str]) -> None:
    async def too_old() -> list[Load]:
        raise EngineError("engine 1 is too old")

    async def play(limiter: AdaptiveConcurrency) -> None:
        tasks = await started(limiter, 50)
        assert done(tasks) == 50

    in_adaptive_room(play, too_old)
    assert "max_running_groups=auto has no effect: engine 1 is too old" in capsys.readouterr().err


def test_engines_are_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.0)
    asked = 0

    async def counted() -> list[Load]:
        nonlocal asked
        asked += 1
        return [IDLE]

    async def play(limiter: AdaptiveConcurrency) -> None:
        await until(lambda: asked >= 5)
        assert limiter.figures().keys() == Congestion.metrics.keys()
        assert limiter.figures()["concurrency/limit"] == 10
        for _ in range(30):
            limiter.taken(ready=50, batch=8, waited=False)
            limiter.window.end(0)
        assert limiter.figures()["concurrency/limit"] == 1

    in_adaptive_room(play, counted)


async def program() -> None:
    """An agent of this name starts programs."""


program.runs_programs = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "kind", "programs"),
    [
        ({}, AdaptiveConcurrency, False),
        ({"agent": f"{__name__}:program"}, AdaptiveConcurrency, True),
        ({"rollout.max_running_groups": 3}, FixedConcurrency, None),
        ({"rollout.max_running_groups": None}, ConcurrencyLimiter, None),
    ],
)
def test_setting_decides_who_limits_groups(settings: Any, kind: type, programs: bool | None, tmp_path: Path) -> None:
    run = RolloutRun(tiny_config(**settings), addresses(), tmp_path, lambda text, traceback=None: None)
    limiter = _limiter(run, _started_hooks(run))
    assert type(limiter) is kind
    assert getattr(limiter, "_programs", None) is programs


def test_too_many_open_files_are_told_as_load_may_stay_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: None)
    config = tiny_config(
        **{
            "rollout.batch_groups": 200,
            "rollout.group_size": 8,
            "rollout.max_staleness": 0,
            "rollout.lead": None,
            "rollout.max_running_groups": "auto",
        }
    )
    told: list[str] = []
    allow_files(config, lambda text, traceback=None: told.append(text), 3)
    assert told == []
    allow_files(config, lambda text, traceback=None: told.append(text))
    assert [text.partition(",")[0] for text in told] == [
        "200 groups of 8 need up to 1856 open files in each of 1 processes"
    ]


def test_what_is_warned_of_while_the_parts_are_built_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No engine serves a version yet."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: None)
    urls = ("http://engine-0", "http://router", "http://rollout")
    folder = catalog.resolve("builtin:tiny")
    addresses = Addresses("run", "key", folder, urls[:1], *urls[1:], gpus=0, started_at=0.0)
    parts = RolloutParts(tiny_config(**{"rollout.max_running_groups": "auto"}), addresses, tmp_path)
    asyncio.run(parts.close())
    (line,) = map(json.loads, (tmp_path / "warnings.jsonl").read_text().splitlines())
    assert line["version"] == 0
    assert "open files" in line["warning"]
