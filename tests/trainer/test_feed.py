"""One batch for all, or word that there will be none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from asyncrl.schema import Batch, encode
from asyncrl.trainer.feed import BatchFeed
from tests.fakes import group


class SourceOf:
    """Gives a batch at the third question."""

    def __init__(self, ready: int = 3) -> None:
        self.asked, self._ready = 0, ready

    def batch(self, version: int, part: int, parts: int, *, interrupt: Callable[[], bool]) -> bytes:
        while True:
            self.asked += 1
            if self.asked >= self._ready:
                return encode(Batch(version, [group(part)], {}, part + 1 == parts))
            if interrupt():
                return b""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)


def batches(
    source: Any, interrupt: bool = False, asked: Callable[[], bool] = lambda: False, parts: int = 1
) -> BatchFeed:
    parallel: Any = None  # of several ranks
    return BatchFeed(source, lambda: interrupt, parallel, asked_to_stop=asked, parts=parts)


def test_a_batch_is_that_of_the_version() -> None:
    feed = batches(SourceOf())
    found = feed.get(7)
    assert found is not None
    assert (found.version, feed.stopped) == (7, False)


def test_engines_needing_weights_interrupt_the_wait() -> None:
    feed = batches(SourceOf(), interrupt=True)
    assert (feed.get(0), feed.stopped) == (None, False)
    assert feed.get(0) is None


def test_gpus_come_back_once_per_batch() -> None:
    taken, parallel = list[int](), cast(Any, None)
    source = SourceOf()
    for interrupted in (True, False):
        feed = BatchFeed(source, lambda: interrupted, parallel, take_back=lambda: taken.append(source.asked))  # noqa: B023
        assert (feed.get(7) is None) is interrupted
    assert taken == [3]


def test_stopping_run_takes_no_further_batch() -> None:
    source = SourceOf(ready=1)
    feed = batches(source, asked=lambda: True)
    assert (feed.get(0), feed.stopped) == (None, True)
    assert source.asked == 0


def test_stopping_run_waits_no_longer() -> None:
    source = SourceOf(ready=100)
    feed = batches(source, asked=lambda: source.asked >= 2)
    assert (feed.get(0), feed.stopped) == (None, True)
    assert source.asked == 2


def test_stopping_run_finishes_a_begun_batch() -> None:
    source = SourceOf(ready=1)
    feed = batches(source, asked=lambda: source.asked > 0, parts=2)
    found = [feed.get(4, part) for part in range(2)]
    assert [part and (part.version, part.groups[0].slot, part.last) for part in found] == [(4, 0, False), (4, 1, True)]
    assert (feed.get(5), feed.stopped) == (None, True)


@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_wait_on_the_host_if_a_publish_needs_gpus(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands for the GPU: only the bytes of a batch that is there may go through it."""
    group: Any = object() if overlap else None
    seen: list[tuple[str, object]] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, src, group=None: seen.append((tensor.device.type, group)))
    parallel: Any = SimpleNamespace(device=torch.device("meta"), is_first=True)
    feed = BatchFeed(None, lambda: False, parallel, group=group)
    with pytest.raises((RuntimeError, NotImplementedError)):  # no bytes can be read from this device
        feed._broadcast(b"batch")
    assert seen[0] == (("cpu", group) if overlap else ("meta", None))
    assert seen[1:] == ([("meta", None)] if overlap else [])
