"""One batch for all, or word that there will be none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from asyncrl.trainer.feed import Batches
from asyncrl.types import Batch, encode
from tests.fakes import group


class DoorOf:
    """Gives a batch at the third question."""

    def __init__(self, ready: int = 3) -> None:
        self.asked, self._ready = 0, ready

    def batch(self, version: int, *, interrupt: Callable[[], bool]) -> bytes:
        while True:
            self.asked += 1
            if self.asked >= self._ready:
                return encode(Batch(version, [group(0)], {}))
            if interrupt():
                return b""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)


def batches(door: Any, interrupt: bool = False, asked: Callable[[], bool] = lambda: False) -> Batches:
    parallel: Any = None  # of several ranks
    return Batches(door, lambda: interrupt, parallel, asked_to_stop=asked)


def test_a_batch_is_that_of_the_version() -> None:
    feed = batches(DoorOf())
    found = feed.get(7)
    assert found is not None
    assert (found.version, feed.stopped) == (7, False)


def test_engines_that_need_weights_interrupt_the_wait_and_nothing_is_over() -> None:
    feed = batches(DoorOf(), interrupt=True)
    assert (feed.get(0), feed.stopped) == (None, False)
    assert feed.get(0) is None


def test_a_run_that_is_asked_to_stop_takes_no_further_batch_although_one_is_ready() -> None:
    door = DoorOf(ready=1)
    feed = batches(door, asked=lambda: True)
    assert (feed.get(0), feed.stopped) == (None, True)
    assert door.asked == 0


def test_a_run_that_is_asked_to_stop_while_it_waits_waits_no_longer() -> None:
    door = DoorOf(ready=100)
    feed = batches(door, asked=lambda: door.asked >= 2)
    assert (feed.get(0), feed.stopped) == (None, True)
    assert door.asked == 2
