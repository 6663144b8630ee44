"""Whatever an environment does costs its own episodes, with a reason; it leaves nothing behind and stops nobody."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.envs import hosted
from asyncrl.envs.env import EnvSpec, Step
from asyncrl.envs.pool import Environments, PoolSettings
from asyncrl.errors import AsyncRLError, EpisodeFailed
from asyncrl.launch.leftovers import carrying
from tests.envs.faulty import FAULTS
from tests.fakes import until

pytestmark = pytest.mark.integration  # processes

MARK = f"ASYNCRL_RUN_ID=pool-{os.getpid()}"
EXPECTED = {
    "raises": ("environment_error", "KeyError: 'on purpose'"),
    "hangs": ("environment_timeout", " s (task.environments."),
    "dies": ("environment_died", "its process ended by signal SIGKILL"),
    "leaves a child": ("environment_died", "its process ended by signal SIGKILL"),
    "exits": ("environment_died", "its process ended by exit code 3; it printed last:\nthe last line"),
    "garbage": ("environment_garbage", "its process sent what is no answer"),
    "oversized": ("environment_oversized", "an answer of 104857"),
    "no step": ("environment_error", "step returned str in the place of a Step"),
    "cannot be sent": ("environment_error", "it returned what cannot be sent"),
    "not finite": ("environment_error", "step gave a reward of nan"),
}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every process that a test has started is gone at its end."""
    monkeypatch.setenv(*MARK.split("="))
    yield
    assert carrying(MARK.encode()) == []


def pool(kind: str = "Faulty", tell: Callable[[str], None] = print, **settings: Any) -> Environments:
    params = settings.pop("params", {})
    quick = {"reset_timeout": 60.0, "step_timeout": 60.0} | settings
    return Environments("faulty", EnvSpec(f"tests.envs.faulty:{kind}", params), PoolSettings(**quick), tell)


async def play(environments: Environments, **question: Any) -> list[Step]:
    async with environments() as env:
        await env.reset(question)  # type: ignore[misc]
        steps: list[Step] = []
        while not steps or not steps[-1].done:
            steps.append(await env.step("a"))  # type: ignore[misc]
        return steps


def run(script: Callable[[Environments], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        environments = pool(**settings)
        try:
            async with asyncio.timeout(120):
                await environments.start()
                await script(environments)
        finally:
            await environments.close()

    asyncio.run(main())


def test_environment_in_a_process_is_the_environment() -> None:
    async def script(environments: Environments) -> None:
        here = await play(pool(hosted=False))
        there, again = await play(environments), await play(environments)
        assert here == there == again == [Step(f"a{n}", 0.5, n == 3) for n in (1, 2, 3)]

    run(script)


@pytest.mark.parametrize(
    ("where", "faults", "limits"),
    [
        ("step", EXPECTED.keys() - {"hangs"}, {}),
        ("step", {"hangs"}, {"step_timeout": 0.5}),
        ("reset", {"raises", "dies"}, {}),
        ("reset", {"hangs"}, {"reset_timeout": 3.0}),
    ],
)
def test_each_fault_has_its_reason_and_the_next_episode_goes_well(
    where: str, faults: set[str], limits: dict[str, float]
) -> None:
    async def script(environments: Environments) -> None:
        for fault in sorted(faults):
            reason, text = EXPECTED[fault]
            with pytest.raises(EpisodeFailed) as caught:
                await play(environments, where=where, fault=fault)
            assert (caught.value.reason, text in caught.value.detail, caught.value.retry) == (reason, True, True), fault
            assert len(await play(environments)) == 3

    run(script, max_failures=1000, per_process=1, **limits)


def test_what_it_prints_is_no_fault_however_much() -> None:
    async def script(environments: Environments) -> None:
        assert len(await play(environments, where="step", fault="prints")) == 3

    assert "prints" in FAULTS
    run(script)


def test_those_that_share_a_process_with_one_that_hangs_are_told_so() -> None:
    async def script(environments: Environments) -> None:
        async with environments() as other:
            await other.reset({})  # type: ignore[misc]
            with pytest.raises(EpisodeFailed, match="environment_timeout"):
                await play(environments, where="step", fault="hangs")
            with pytest.raises(EpisodeFailed, match="environment_died: another environment in its process hung"):
                await other.step("a")  # type: ignore[misc]

    run(script, step_timeout=0.3, per_process=2)


def test_those_in_other_processes_go_on() -> None:
    async def script(environments: Environments) -> None:
        async with environments() as other:
            await other.reset({})  # type: ignore[misc]
            with pytest.raises(EpisodeFailed, match="environment_timeout"):
                await play(environments, where="step", fault="hangs")
            assert (await other.step("a")).messages == "a1"  # type: ignore[misc]

    run(script, step_timeout=0.3, per_process=1)


def test_no_more_live_at_once_than_allowed() -> None:
    async def script(environments: Environments) -> None:
        alive = most = 0
        all_three = asyncio.Barrier(3)

        async def one() -> None:
            nonlocal alive, most
            async with environments():
                alive, most = alive + 1, max(most, alive + 1)
                await all_three.wait()
                alive -= 1

        await asyncio.gather(*(one() for _ in range(9)))
        assert most == 3

    run(script, concurrency=3, kind="AsyncFaulty")


def test_warm_ones_are_made_ahead_and_every_one_is_ended(tmp_path: Path) -> None:
    async def script(environments: Environments) -> None:
        await until(lambda: len(environments._ready) == 2)
        for _ in range(3):
            await play(environments)

    run(script, warm=2, params={"marks": str(tmp_path)}, hosted=False)
    made, closed = (len(list(tmp_path.glob(f"{what}-*"))) for what in ("made", "closed"))
    assert made == closed >= 3


@pytest.mark.parametrize("fault", ["hangs", "raises"])
def test_environment_that_does_not_end_is_told_and_holds_nobody(fault: str) -> None:
    told: list[str] = []

    async def script(environments: Environments) -> None:
        assert len(await play(environments, where="close", fault=fault)) == 3
        assert told == []  # nobody has waited for its end

    run(script, tell=told.append, reset_timeout=3.0)
    assert "environment faulty did not end: environment_" in told[0]


def test_environment_that_cannot_be_made_is_typed() -> None:
    async def script(environments: Environments) -> None:
        for hosted_ in (False, True):
            with pytest.raises(EpisodeFailed, match="environment_error: OSError: no display"):
                await play(pool("NeverMade", hosted=hosted_) if not hosted_ else environments)

    run(script, kind="NeverMade", hosted=True)


def test_async_environment_that_hangs_is_given_up_in_the_event_loop() -> None:
    async def script(environments: Environments) -> None:
        assert not environments._hosted
        with pytest.raises(EpisodeFailed, match=r"environment_timeout: step has not returned for 0.2 s"):
            await play(environments, where="step", fault="hangs")

    run(script, kind="AsyncFaulty", step_timeout=0.2)


def test_cancelled_episode_gives_its_environment_back(tmp_path: Path) -> None:
    async def script(environments: Environments) -> None:
        playing = asyncio.create_task(play(environments, where="step", fault="hangs"))
        await asyncio.sleep(0.3)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        assert len(await play(environments)) == 3

    run(script, concurrency=1, per_process=1, reset_timeout=5.0)  # its end waits so long for its step


def test_repeated_failures_open_a_breaker_that_lets_one_try_and_closes_when_it_goes_well(tmp_path: Path) -> None:
    told: list[str] = []

    async def script(environments: Environments) -> None:
        fault = {"where": "step", "fault": "raises"}
        for _ in range(3):
            with pytest.raises(EpisodeFailed):
                await play(environments, **fault)
        assert told == [told[0]]
        assert told[0].startswith(
            "environment faulty has failed 3 times in a row, and episodes wait: environment_error"
        )
        both = [asyncio.create_task(play(environments)) for _ in range(2)]
        found = await asyncio.gather(*both)
        assert [len(one) for one in found] == [3, 3]
        assert "works again" in told[1]

    run(script, tell=told.append, max_failures=3, hosted=False)


def test_breaker_that_stays_open_ends_the_run_and_names_the_environment() -> None:
    async def script(environments: Environments) -> None:
        async def go_on() -> None:
            for _ in range(5):
                with pytest.raises(EpisodeFailed):
                    await play(environments, where="step", fault="raises")

        with pytest.raises(AsyncRLError, match=r"environment faulty has failed \d+ times in a row, for") as caught:
            await go_on()
        assert not isinstance(caught.value, EpisodeFailed)
        assert "task.environments.patience" in str(caught.value)

    run(script, max_failures=1, patience=0.5, hosted=False)


def test_answers_up_to_the_limit_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(environments: Environments) -> None:
        monkeypatch.setattr(hosted, "OVERSIZED", 120 << 20)
        async with environments() as env:
            await env.reset({"where": "step", "fault": "oversized"})  # type: ignore[misc]
            assert len((await env.step("a")).messages) == 100 << 20  # type: ignore[misc]

    run(script)
