"""An environment that is at fault in a process of its own costs its own episodes, with a reason, and nothing else."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from asyncrl.envs.env import Step
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.hosting import hosted
from asyncrl.launch.leftovers import carrying
from tests.envs.faulty import FAULTS
from tests.envs.pools import cannot_be_made, limited, play, pool, rewards_are_numbers, run, told
from tests.fakes import until

pytestmark = pytest.mark.integration  # processes

MARK = f"ASYNCRL_RUN_ID=pool-{os.getpid()}"
EXPECTED = {
    "raises": ("environment_error", "KeyError: 'on purpose'"),
    "hangs": ("environment_timeout", " s (task.environments."),
    "dies": ("environment_died", "its process was killed by SIGKILL"),
    "leaves a child": ("environment_died", "its process was killed by SIGKILL"),
    "exits": ("environment_died", "its process exited with status 3; its last output:\nthe last line"),
    "garbage": ("environment_garbage", "its process sent an invalid answer"),
    "oversized": ("environment_oversized", "its answer has 104857"),
    "no step": ("environment_error", "step returned str instead of a Step"),
    "cannot be sent": ("environment_error", "it returned a value that cannot be sent"),
    "no messages": ("environment_error", " are ['a text']: each must have role and content"),
    "not finite": ("environment_error", "ValueError: the reward of a step is nan: it must be a finite number"),
}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that a test has started is gone at its end."""
    monkeypatch.setenv(*MARK.split("="))
    yield
    assert carrying(MARK.encode()) == []


def test_environment_in_a_process_is_the_environment() -> None:
    async def script(environments: EnvironmentPool) -> None:
        here = await play(pool(hosted=False))
        there, again = await play(environments), await play(environments)
        assert here == there == again == [Step(f"a{n}", 0.5, n == 3) for n in (1, 2, 3)]

    run(script)


@pytest.mark.parametrize(
    ("where", "faults", "limits"),
    [
        ("step", EXPECTED.keys() - {"hangs"}, {}),
        ("step", {"hangs"}, {"step_timeout": 0.5}),
        ("reset", {"raises", "dies", "no messages"}, {}),
        ("reset", {"hangs"}, {"reset_timeout": 3.0}),
    ],
)
def test_each_fault_has_its_reason_and_the_next_goes_well(
    where: str, faults: set[str], limits: dict[str, float]
) -> None:
    async def script(environments: EnvironmentPool) -> None:
        for fault in sorted(faults):
            reason, text = EXPECTED[fault]
            with pytest.raises(EpisodeFailed) as caught, limited(environments, **limits):
                await play(environments, where=where, fault=fault)
            assert (caught.value.reason, text in caught.value.detail, caught.value.retry) == (reason, True, True), fault
            assert len(await play(environments)) == 3

    run(script, max_failures=1000, per_process=1)


def test_what_it_prints_is_no_fault_however_much() -> None:
    async def script(environments: EnvironmentPool) -> None:
        assert len(await play(environments, where="step", fault="prints")) == 3

    assert "prints" in FAULTS
    run(script)


def test_neighbours_of_a_hanging_environment_are_told() -> None:
    async def script(environments: EnvironmentPool) -> None:
        async with environments() as other:
            await other.reset({})  # type: ignore[misc]
            with pytest.raises(EpisodeFailed, match="environment_timeout"), limited(environments, step_timeout=0.3):
                await play(environments, where="step", fault="hangs")
            with pytest.raises(EpisodeFailed, match="environment_died: another environment in its process hung"):
                await other.step("a")  # type: ignore[misc]

    run(script, per_process=2)


def test_next_one_lives_in_another_process_at_once() -> None:
    """Although there was room in the one that has just been killed."""

    async def script(environments: EnvironmentPool) -> None:
        with pytest.raises(EpisodeFailed, match="environment_timeout"), limited(environments, step_timeout=0.3):
            await play(environments, where="step", fault="hangs")
        assert len(await play(environments)) == 3

    run(script)


def test_those_in_other_processes_go_on() -> None:
    async def script(environments: EnvironmentPool) -> None:
        async with environments() as other:
            await other.reset({})  # type: ignore[misc]
            with pytest.raises(EpisodeFailed, match="environment_timeout"), limited(environments, step_timeout=0.3):
                await play(environments, where="step", fault="hangs")
            assert (await other.step("a")).messages == "a1"  # type: ignore[misc]

    run(script, per_process=1)


@pytest.mark.parametrize("fault", ["hangs", "raises"])
def test_environment_that_does_not_end_is_told_and_holds_nobody(fault: str) -> None:
    told: list[str] = []

    async def script(environments: EnvironmentPool) -> None:
        assert len(await play(environments)) == 3  # in a process that takes the next one, too
        with limited(environments, reset_timeout=3.0):
            assert len(await play(environments, where="close", fault=fault)) == 3
        assert told == []  # nobody has waited for its end

    run(script, tell=told.append)
    assert "environment faulty did not close: environment_" in told[0]


def test_environment_that_cannot_be_made_is_typed() -> None:
    run(cannot_be_made, kind="NeverMade", hosted=True)


def test_cancelled_episode_gives_its_environment_back(tmp_path: Path) -> None:
    async def script(environments: EnvironmentPool) -> None:
        with limited(environments, reset_timeout=5.0):  # its end waits so long for its step
            playing = asyncio.create_task(play(environments, where="step", fault="hangs"))
            await asyncio.sleep(0.3)
            playing.cancel()
            await asyncio.wait([playing])
        assert playing.cancelled()
        assert len(await play(environments)) == 3

    run(script, concurrency=1, per_process=1)


@pytest.mark.parametrize(("kind", "own"), [("Telling", {}), ("AsyncFaulty", {"hosted": True})])
def test_what_would_stop_the_event_loop_lives_in_a_process(kind: str, own: dict[str, bool]) -> None:
    async def script(environments: EnvironmentPool) -> None:
        async with environments() as env:
            await env.reset({})  # type: ignore[misc]
            assert len(carrying(MARK.encode())) == 1

    run(script, kind=kind, **own)


def test_processes_hold_as_many_as_they_shall_and_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes at once, and whoever has gone before."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    both = asyncio.Barrier(5)

    async def script(environments: EnvironmentPool) -> None:
        async def one() -> str:
            async with environments() as env:
                assert await told(env, "gpus") == "''"
                await both.wait()
                return await told(env, "pid")

        seen = set[str]()
        for _ in range(2):
            pids = await asyncio.gather(*(one() for _ in range(5)))
            assert sorted(pids.count(pid) for pid in set(pids)) == [1, 2, 2]
            seen |= set(pids)
        assert len(seen) == 3  # who has gone has left room

    run(script, kind="Telling", per_process=2)


def test_warm_one_whose_process_has_died_is_given_to_nobody() -> None:
    async def script(environments: EnvironmentPool) -> None:
        await until(lambda: len(environments._ready) == 2)
        for pid in carrying(MARK.encode()):
            os.kill(pid, signal.SIGKILL)
        hosts = environments._hosts
        assert isinstance(hosts, hosted.HostProcesses)
        await until(lambda: not hosts._hosts[0].alive)
        assert len(await play(environments)) == 3
        await until(lambda: len(environments._ready) == 2)  # and as many are warm again
        assert len(await play(environments)) == 3

    run(script, warm=2)


def test_as_many_are_made_ahead_as_shall_be_warm(tmp_path: Path) -> None:
    async def script(environments: EnvironmentPool) -> None:
        for _ in range(2):
            await until(lambda: len(environments._ready) == 3)
            await play(environments)
        await until(lambda: len(environments._ready) == 3)

    run(script, warm=3, params={"marks": str(tmp_path)})
    assert len(list(tmp_path.glob("made-*"))) == 3 + 2


def test_rewards_of_roles_and_dues_are_numbers() -> None:
    run(partial(rewards_are_numbers, hosted=True), kind="Telling", hosted=True)


@pytest.mark.parametrize(
    ("action", "how"),
    [
        ("long", r"exited with status 3; its last output:\n(x+the end of the line|x+)$"),
        ("unended", r"exited with status 0; its last output:\nno end of the line$"),
    ],
)
def test_last_words_are_kept_within_bounds(action: str, how: str) -> None:
    async def script(environments: EnvironmentPool) -> None:
        with pytest.raises(EpisodeFailed) as caught:
            async with environments() as env:
                await env.step(action)  # type: ignore[misc]
        assert re.search(how, caught.value.detail), caught.value.detail[-100:]
        assert len(caught.value.detail) < hosted.LAST_CHARACTERS + 200
        with pytest.raises(EpisodeFailed, match="exited with status"):  # who asks later is told the same
            await env.step("pid")  # type: ignore[misc]

    run(script, kind="Telling")


def test_answers_up_to_the_limit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(environments: EnvironmentPool) -> None:
        monkeypatch.setattr(hosted, "OVERSIZED", 120 << 20)
        async with environments() as env:
            await env.reset({"where": "step", "fault": "oversized"})  # type: ignore[misc]
            assert len((await env.step("a")).messages) == 100 << 20  # type: ignore[misc]

    run(script)
