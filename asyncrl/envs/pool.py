"""Environments for episodes: made when one begins, ended when it is over."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from asyncrl.envs.env import Env


class Environments:
    """Those of one task."""

    def __init__(self, make: Callable[[], Env]) -> None:
        self._make = make

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Env]:
        """One, for an episode; its `close`, if it has one, is called when that is over, however it ends."""
        env = self._make()
        try:
            yield env
        finally:
            if close := getattr(env, "close", None):
                ended = close()
                if inspect.isawaitable(ended):
                    await ended
