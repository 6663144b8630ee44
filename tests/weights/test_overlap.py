"""A publish beside training: one in flight at most, its error reaches the loop, and what is announced is that of its
own batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncrl.errors import PeerFailed
from asyncrl.weights.background import SPAN, Background
from asyncrl.weights.publish import Staged, StagedPublisher
from tests.weights.publishing import TENSORS, published


class Parts(StagedPublisher):
    """Publisher whose background part ends when a version is let go."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.go: dict[int, threading.Event] = {version: threading.Event() for version in range(1, 5)}
        self.error: BaseException | None = None

    def stage(self, version: int) -> Staged:
        self.events.append(f"stage {version}")
        return Staged(version, {"fill": 0.5, "bytes": 8.0, "engines": 2.0})

    def complete(self, staged: Staged) -> dict[str, float]:
        assert self.go[staged.version].wait(10)
        self.events.append(f"complete {staged.version}")
        if self.error:
            raise self.error
        return {**staged.metrics, "pause": float(staged.version), "verify": 0.25, "engines": 1.0}


@pytest.fixture
def parts() -> Iterator[Parts]:
    made = Parts()
    yield made
    for event in made.go.values():
        event.set()


def test_next_publish_waits_for_the_one_in_flight(parts: Parts) -> None:
    spans: list[tuple[str, int]] = []
    publisher = Background(parts, ended=lambda name, batch, start, end: spans.append((name, batch)))
    first = publisher.publish(1)
    assert first == {"fill": 0.5, "bytes": 8.0, "engines": 2.0, "pause": 0.0, "verify": 0.0, "background": 0.0}
    parts.events.append("train")
    threading.Timer(0.05, parts.go[1].set).start()
    second = publisher.publish(2)
    assert parts.events == ["stage 1", "train", "complete 1", "stage 2"]
    assert second | {"background": 0.0} == {**first, "pause": 1.0, "verify": 0.25, "engines": 1.0}
    assert second["background"] >= 0.04
    parts.go[2].set()
    publisher.finish()
    publisher.finish()
    assert parts.events[-1] == "complete 2"
    assert spans == [(SPAN, 0), (SPAN, 1)]


@pytest.mark.parametrize("meets", ["publish", "finish", "wait"])
def test_background_error_reaches_the_loops_next_act(meets: str, parts: Parts) -> None:
    failed: list[BaseException] = []
    parts.error = PeerFailed("the rollout server answered 500")
    parts.go[1].set()
    publisher = Background(parts, failed=failed.append)
    publisher.publish(1)

    def wait() -> None:
        deadline = time.monotonic() + 10
        while not publisher.idle() and time.monotonic() < deadline:  # as a trainer that polls for a batch
            time.sleep(0.01)

    with pytest.raises(PeerFailed, match="answered 500"):
        {"publish": lambda: publisher.publish(2), "finish": publisher.finish, "wait": wait}[meets]()
    assert failed == [parts.error]
    assert "stage 2" not in parts.events


def test_publisher_is_not_idle_while_a_publish_is_in_flight(parts: Parts) -> None:
    """A trainer that waits for a batch then leaves the fleet alone."""
    publisher = Background(parts)
    assert publisher.idle()
    publisher.publish(1)
    assert [publisher.idle(), publisher.idle()] == [False, False]
    parts.go[1].set()
    publisher.finish()
    assert publisher.idle()


def test_staged_weights_are_sent_as_they_were() -> None:
    """The transport compares each bucket with the tensors before they change."""
    before = {name: tensor.clone() for name, tensor in TENSORS.items()}

    def change(publisher: Any, version: int) -> None:
        staged = publisher.stage(version)
        for tensor in TENSORS.values():
            tensor.add_(1)
        thread = threading.Thread(target=publisher.complete, args=(staged,))
        thread.start()
        thread.join()

    try:
        assert published("cpu", staging="full", publish=change, expected=before) == [f"send {n}" for n in range(4)]
    finally:
        for name, tensor in TENSORS.items():
            tensor.copy_(before[name])


def test_gradients_are_off_in_the_thread_as_in_the_loop() -> None:
    seen: list[bool] = []

    def note(publisher: Any, version: int) -> None:
        staged = publisher.stage(version)
        publisher._deliver = lambda version: seen.append(torch.is_grad_enabled())
        thread = threading.Thread(target=publisher.complete, args=(staged,))
        thread.start()
        thread.join()

    published("cpu", staging="full", publish=note)
    assert seen == [False]
