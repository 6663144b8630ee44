"""Whatever an environment does costs its own episodes, with a reason; it leaves nothing behind and stops nobody."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from asyncrl.envs.pool import EnvironmentPool
from asyncrl.errors import AsyncRLError, ConfigError, EpisodeFailed
from tests.envs.pools import cannot_be_made, play, pool, rewards_are_numbers, run, told
from tests.fakes import until


def test_no_more_live_at_once_than_allowed() -> None:
    async def script(environments: EnvironmentPool) -> None:
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
    async def script(environments: EnvironmentPool) -> None:
        await until(lambda: len(environments._ready) == 2)
        for _ in range(3):
            await play(environments)
        await until(lambda: len(environments._ready) == 2)

    run(script, warm=2, params={"marks": str(tmp_path)}, hosted=False)
    made, closed = (len(list(tmp_path.glob(f"{what}-*"))) for what in ("made", "closed"))
    assert made == closed == 3 + 2


def test_environment_that_cannot_be_made_is_typed() -> None:
    run(cannot_be_made, kind="NeverMade", hosted=False)


def test_hanging_async_environment_is_given_up() -> None:
    async def script(environments: EnvironmentPool) -> None:
        assert environments._hosts is None
        with pytest.raises(EpisodeFailed, match=r"environment_timeout: step did not return within 0.2 s"):
            await play(environments, where="step", fault="hangs")

    run(script, kind="AsyncFaulty", step_timeout=0.2)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_what_is_no_message_is_the_environments_fault(where: str) -> None:
    async def script(environments: EnvironmentPool) -> None:
        with pytest.raises(EpisodeFailed, match=rf"environment_error: .*{where} are \['a text'\]: each must have role"):
            await play(environments, where=where, fault="no messages")

    run(script, kind="AsyncFaulty")


def test_breaker_opens_tries_once_and_closes_on_success(tmp_path: Path) -> None:
    told: list[str] = []

    async def script(environments: EnvironmentPool) -> None:
        fault = {"where": "step", "fault": "raises"}
        for _ in range(3):
            with pytest.raises(EpisodeFailed):
                await play(environments, **fault)
        assert told == [told[0]]
        assert told[0].startswith("environment faulty has failed 3 times in a row; episodes wait: environment_error")
        both = [asyncio.create_task(play(environments)) for _ in range(2)]
        found = await asyncio.gather(*both)
        assert [len(one) for one in found] == [3, 3]
        assert "works again" in told[1]

    run(script, tell=told.append, max_failures=3, hosted=False)


def test_open_breaker_ends_the_run_and_names_the_environment() -> None:
    async def script(environments: EnvironmentPool) -> None:
        async def go_on() -> None:
            for _ in range(5):
                with pytest.raises(EpisodeFailed):
                    await play(environments, where="step", fault="raises")

        with pytest.raises(AsyncRLError, match=r"environment faulty has failed \d+ times in a row, for") as caught:
            await go_on()
        assert not isinstance(caught.value, EpisodeFailed)
        assert "task.environments.patience" in str(caught.value)

    run(script, max_failures=1, patience=0.5, hosted=False)


def test_it_lives_here_where_it_shall() -> None:
    async def script(environments: EnvironmentPool) -> None:
        async with environments() as env:
            assert await env.reset({}) == []  # type: ignore[misc]
            assert await told(env, "pid") == str(os.getpid())

    run(script, kind="Telling", hosted=False)


def test_environment_that_cannot_be_made_ahead_is_told() -> None:
    said: list[str] = []

    async def script(environments: EnvironmentPool) -> None:
        await until(lambda: said)

    run(script, kind="NeverMade", warm=1, hosted=False, tell=said.append)
    assert said[0].startswith(
        "environment faulty could not be created ahead of time: environment_error: OSError: no display"
    )


def test_rewards_of_roles_and_dues_are_numbers() -> None:
    run(partial(rewards_are_numbers, hosted=False), kind="Telling", hosted=False)


def test_endless_environment_is_told_and_holds_nobody() -> None:
    said: list[str] = []

    async def script(environments: EnvironmentPool) -> None:
        async with environments() as env:
            await env.reset({})  # type: ignore[misc]
            environments._settings = replace(environments._settings, reset_timeout=0.2)
        assert said == []

    run(script, kind="Lingering", hosted=False, tell=said.append)
    assert "environment faulty did not close: " in said[0]


def test_other_failures_do_not_open_the_breaker() -> None:
    said: list[str] = []

    async def script(environments: EnvironmentPool) -> None:
        for _ in range(3):
            with pytest.raises(EpisodeFailed, match="agent_error"):
                async with environments():
                    raise EpisodeFailed("agent_error", "a bug")
        assert len(await play(environments)) == 3

    run(script, hosted=False, max_failures=2, patience=0.0, tell=said.append)
    assert said == []


def test_process_environments_need_an_extension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.lookup.loaded", lambda attribute: [])
    assert pool("AsyncFaulty") is not None
    for kind, settings in (("Faulty", {}), ("AsyncFaulty", {"hosted": True})):
        with pytest.raises(ConfigError, match=r"task\.environments\.hosted: .*make `step` async, or set false"):
            pool(kind, **settings)
