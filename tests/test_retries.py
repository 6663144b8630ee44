"""Pauses between attempts grow, differ from client to client, and are bounded."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncrl import retries
from asyncrl.retries import pause


@pytest.mark.parametrize(
    ("limits", "longest"),
    [
        ({}, [0.1, 0.2, 0.4, 5.0]),
        ({"first": 1.0, "longest": 30.0}, [1.0, 2.0, 4.0, 30.0]),
        ({"first": 0.5, "longest": math.inf}, [0.5, 1.0, 2.0, 512.0]),
    ],
)
def test_pauses_double_up_to_their_limit(
    limits: dict[str, float], longest: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(retries.asyncio, "sleep", sleep)
    for number in (0, 1, 2, 10):
        asyncio.run(pause(number, **limits))
    assert all(most / 2 <= one <= most for one, most in zip(slept, longest, strict=True))
