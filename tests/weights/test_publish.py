"""Buckets are filled and sent in the right order, in two CUDA streams where there are GPUs. No engine joins with other
weights than were sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import Update
from asyncrl.network.addresses import Access
from asyncrl.parallel import Parallel
from asyncrl.weights.publish import Outgoing, Publisher
from tests.integration.publisher import ALONE, FakeRollout
from tests.weights.publishing import TENSORS, NotingTransport, Weights, published


def test_every_bucket_is_sent_in_its_turn() -> None:
    assert published("cpu") == [f"send {number}" for number in range(4)]


class Stream:
    """A CUDA stream that notes what is asked of it."""

    events: list[str]

    def __init__(self, device: torch.device) -> None: ...

    def wait_stream(self, other: object) -> None:
        self.events.append(f"wait for {other}")

    def synchronize(self) -> None:
        self.events.append("finish")


def test_bucket_is_sent_in_its_own_stream_behind_its_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's stream waits for what fills; what fills never waits for the sender's stream or for the device."""

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        stream.events.append("enter")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "filling")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the whole device"))
    each = (["wait for filling", "enter", f"send {number}", "finish"] for number in range(4))
    assert published("cuda") == [event for events in each for event in events]


def test_filled_buckets_wait_for_the_device_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        stream.events.append("enter")
        yield

    filling = Stream(torch.device("cuda"))

    def publish(publisher: Any, version: int) -> None:
        filling.events = publisher._stream.events
        staged = publisher.stage(version)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("asks for the stream of training"))
        publisher.complete(staged)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: filling)
    each = [["enter", f"send {number}", "finish"] for number in range(4)]
    found = published("cuda", staging="full", publish=publish)
    assert found == ["finish", *[event for events in each for event in events]]


# --- engines that join --------------------------------------------------------------------------------------


class Engines:
    """Engines that serve from version 0 on and report the checksums that they are given, and their router."""

    def __init__(self, *urls: str) -> None:
        self.checksums, self.label = dict.fromkeys(urls, "right"), dict.fromkeys(urls, "start")
        self.asked: list[str] = []
        self.routed: set[str] = set()

    def fleet(self) -> Fleet:
        fleet = Fleet(list(self.checksums), Access(""), 5.0, router=self, on_lost=lambda *_: None)
        fleet._http = httpx.Client(transport=httpx.MockTransport(self._answer))
        return fleet

    def _answer(self, request: httpx.Request) -> httpx.Response:
        url, path = f"http://{request.url.host}", request.url.path
        if path == "/update_weight_version":
            self.label[url] = json.loads(request.content)["new_version"]
        if path == "/weights_checker":
            self.asked.append(url)
        rank = {"checksums": {"w": self.checksums[url]}, "parallelism_info": [{"role": "target", "tp_rank": 0}]}
        return httpx.Response(200, json={"success": True, "weight_version": self.label[url], "ranks": [rank]})

    def add(self, url: str) -> None:
        self.routed.add(url)

    def remove(self, url: str) -> None:
        self.routed.discard(url)

    def keep(self, urls: Any) -> None:
        self.routed.update(urls)


class Expected:
    """Checksums of what was sent."""

    def add(self, name: str, tensor: Tensor) -> None: ...

    def result(self) -> list[dict[str, str]]:
        return [{"w": "right"}]


@pytest.mark.parametrize("every", [None, 100])
@pytest.mark.parametrize("holds", ["right", "wrong"])
def test_joining_engine_proves_weights_before_requests(every: int | None, holds: str) -> None:
    """However rarely the others are verified (weights.verify_every)."""
    engines = Engines("http://first")
    fleet = engines.fleet()
    settings = SimpleNamespace(staging="stream", pause_mode="in_place", verify=True, verify_every=every, bucket_mb=0)
    publisher = Publisher(
        Parallel(**ALONE),
        Update(fleet, mode="in_place"),
        NotingTransport([], TENSORS),
        Outgoing(Weights(), Expected),  # type: ignore[arg-type]
        settings,  # type: ignore[arg-type]
        FakeRollout(),
    )
    try:
        publisher.publish(1)
        publisher.publish(2)
        assert engines.asked == ["http://first"]  # at the first version, and not at the second
        engines.checksums["http://second"], engines.label["http://second"] = holds, "start"
        fleet.join("http://second")
        publisher.publish(3)
        assert sorted(engines.asked[1:]) == ["http://first", "http://second"]
        assert ("http://second" in engines.routed) == ("http://second" in fleet.serving) == (holds == "right")
        assert fleet.serving[0] == "http://first"
    finally:
        fleet.close()
