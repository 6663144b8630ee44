"""Pools of environments for tests, and episodes in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.envs.env import EnvSpec, Step
from asyncrl.envs.pool import EnvironmentPool, PoolSettings
from asyncrl.errors import EpisodeFailed


def pool(kind: str = "Faulty", tell: Callable[[str], None] = print, **settings: Any) -> EnvironmentPool:
    params = settings.pop("params", {})
    quick = {"reset_timeout": 60.0, "step_timeout": 60.0} | settings
    return EnvironmentPool("faulty", EnvSpec(f"tests.envs.faulty:{kind}", params), PoolSettings(**quick), tell)


@contextmanager
def limited(environments: EnvironmentPool, **limits: float) -> Iterator[None]:
    """Give the environments that are made in this block other limits: the others have all the time of the machine."""
    before = environments._settings
    environments._settings = replace(before, **limits)
    try:
        yield
    finally:
        environments._settings = before


async def play(environments: EnvironmentPool, **question: Any) -> list[Step]:
    async with environments() as env:
        await env.reset(question)  # type: ignore[misc]
        steps: list[Step] = []
        while not steps or not steps[-1].done:
            steps.append(await env.step("a"))  # type: ignore[misc]
        return steps


def run(script: Callable[[EnvironmentPool], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        environments = pool(**settings)
        try:
            async with asyncio.timeout(120):
                await environments.start()
                await script(environments)
        finally:
            await environments.close()

    asyncio.run(main())


async def told(env: Any, action: str) -> str:
    return str((await env.step(action)).messages)


# -- what holds in this process and in another one -------------------------------------------------------------


async def cannot_be_made(environments: EnvironmentPool) -> None:
    with pytest.raises(EpisodeFailed, match="environment_error: OSError: no display"):
        await play(environments)


async def rewards_are_numbers(environments: EnvironmentPool, *, hosted: bool) -> None:
    async def due(reward: float | None) -> float:
        others = pool("Due", hosted=hosted, params={"due": reward})
        try:
            async with others() as env:
                found: float = await env.finish()  # type: ignore[attr-defined]
                return found
        finally:
            await others.close()

    async with environments() as env:
        assert await env.finish() == 0.0  # type: ignore[attr-defined] # nothing is due
        with pytest.raises(EpisodeFailed, match="the reward of black is nan"):
            await env.step("nan")  # type: ignore[misc]
    assert await due(0.25) == 0.25
    with pytest.raises(EpisodeFailed, match="the reward of finish is nan"):
        await due(float("nan"))
