"""Receivers that die within a broadcast over gloo: the others leave its group, meet in a new one, and get the bucket.

The receivers are processes of their own with SGLang's endpoints. Like its scheduler, each does one thing at a time, and
waits in a broadcast for half an hour. Of ranks 0 to 3, rank 2 passes on to rank 3 what it receives.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.network.addresses import Access
from asyncrl.weights import distributed
from asyncrl.weights.bucket import plan_buckets
from asyncrl.weights.distributed import DistributedTransport, group_beside_the_default

LOCAL = "127.0.0.1"
PATIENCE, HALF_AN_HOUR = 60.0, 1800.0
"""Deadlines of calls and broadcasts here, and of SGLang's groups."""


class Receiver(BaseHTTPRequestHandler):
    """An engine that receives."""

    groups: dict[str, dist.ProcessGroup] = {}  # noqa: RUF012
    scheduler = threading.Lock()
    dies = 0
    held = ""

    def do_GET(self) -> None:
        if self.path == "/state":
            return self._answer(200, {"groups": len(dist.distributed_c10d._world.pg_map), "held": Receiver.held})
        with self.scheduler:
            return self._answer(200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.scheduler:
            try:
                getattr(self, self.path[1:])(body)
            except (KeyError, RuntimeError) as error:
                return self._answer(400, {"success": False, "message": repr(error)})
        return self._answer(200, {"success": True})

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        url, name = f"tcp://{body['master_address']}:{body['master_port']}", body["group_name"]
        self.groups[name] = group_beside_the_default(
            body["backend"], url, body["world_size"], name, HALF_AN_HOUR, rank=body["rank_offset"]
        )

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        dist.destroy_process_group(self.groups.pop(body["group_name"]))

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        if Receiver.dies:
            os.kill(os.getpid(), Receiver.dies)
        flat = torch.empty(body["shapes"][0], dtype=getattr(torch, body["dtypes"][0]))
        dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
        Receiver.held = digest(flat)

    def fails(self, body: dict[str, Any]) -> None:
        Receiver.dies = body["by"]

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def digest(flat: Tensor) -> str:
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def receive(ends: Connection) -> None:
    torch.set_num_threads(1)
    server = ThreadingHTTPServer((LOCAL, 0), Receiver)
    server.daemon_threads = True
    ends.send(server.server_port)
    server.serve_forever()


def send(urls: list[str], ends: Connection) -> None:
    """Send a bucket as a trainer that is killed then."""
    sender = Sender(Fleet(urls, Access(""), PATIENCE))
    ends.send(sender.send(1.0))
    threading.Event().wait()


@dataclass
class Sender:
    """A trainer's rank that sends one tensor of this many numbers."""

    fleet: Fleet
    numbers: int = 1000
    transport: DistributedTransport = field(init=False)

    def __post_init__(self) -> None:
        self.transport = DistributedTransport(self.fleet, 1, host=LOCAL, stage=0, backend="gloo")

    def send(self, value: float) -> str:
        """Send it, and return its digest."""
        flat = torch.full((self.numbers,), value)
        (bucket,) = plan_buckets([("w", torch.float32, flat.shape)], 1 << 30)
        self.transport.send(flat.view(torch.uint8), bucket)
        return digest(flat)


START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload([__name__])


@pytest.fixture
def receivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, BaseProcess]]:
    """Start three receivers."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    started: dict[str, BaseProcess] = {}
    for _ in range(3):
        ours, theirs = multiprocessing.Pipe()
        process = START.Process(target=receive, args=(theirs,), daemon=True)
        process.start()
        assert ours.poll(PATIENCE)
        started[f"http://{LOCAL}:{ours.recv()}"] = process
    yield started
    for process in started.values():
        process.kill()
        process.join(PATIENCE)


def own_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(
    ("victim", "by"),
    [
        pytest.param(0, signal.SIGKILL, id="a receiver"),
        pytest.param(1, signal.SIGKILL, id="one that passes on"),
        pytest.param(1, signal.SIGSTOP, id="one that passes on hangs"),
    ],
)
def test_receivers_meet_again_after_a_broken_broadcast(victim: int, by: int, receivers: dict[str, BaseProcess]) -> None:
    """None is lost with it that only waited for it, and no group of before is left, in the trainer or elsewhere."""
    lost: list[str] = []

    def kill(url: str, incarnation: str, reason: str) -> None:
        """Do what the launcher does with an engine that is given up."""
        fleet.timeout = PATIENCE
        receivers[url].kill()
        lost.append(url)

    before, urls = own_groups(), list(receivers)
    fleet = Fleet(urls, Access(""), PATIENCE, on_lost=kill)
    sender = Sender(fleet)
    first = sender.send(1.0)
    assert {fleet.get(url, "/state")["held"] for url in urls} == {first}
    fleet.post(urls[victim], "/fails", {"by": by})
    if by == signal.SIGSTOP:
        fleet.timeout = 2.0
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2.0), sender.transport._group)
    second = sender.send(2.0)
    assert lost == [urls[victim]]
    assert list(fleet.urls) == [url for url in urls if url != urls[victim]]
    assert [fleet.get(url, "/state") for url in fleet.urls] == [{"groups": 1, "held": second}] * 2
    assert own_groups() == before + 1
    third = sender.send(3.0)  # in the same group
    assert [fleet.get(url, "/state") for url in fleet.urls] == [{"groups": 1, "held": third}] * 2
    sender.transport._leave()
    assert own_groups() == before
    fleet.close()


@pytest.mark.nightly
def test_receiver_left_in_the_middle_is_lost_too(
    receivers: dict[str, BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer fails at rank 1 while it sends to rank 2, which gloo may not wake. The last one gets the bucket."""
    monkeypatch.setattr(distributed, "LEAVE_SECONDS", 2.0)
    lost: list[str] = []

    def kill(url: str, incarnation: str, reason: str) -> None:
        receivers[url].kill()
        lost.append(url)

    urls = list(receivers)
    fleet = Fleet(urls, Access(""), PATIENCE, on_lost=kill)
    sender = Sender(fleet, numbers=1 << 24)
    sender.send(1.0)
    fleet.post(urls[0], "/fails", {"by": signal.SIGKILL})
    sent = sender.send(2.0)
    assert lost in (urls[:1], urls[:2])
    assert [fleet.get(url, "/state") for url in fleet.urls] == [{"groups": 1, "held": sent}] * (3 - len(lost))
    sender.transport._leave()
    fleet.close()


def test_group_of_a_dead_trainer_leaves_the_engines(receivers: dict[str, BaseProcess]) -> None:
    ours, theirs = multiprocessing.Pipe()
    urls = list(receivers)
    trainer = START.Process(target=send, args=(urls, theirs), daemon=True)
    trainer.start()
    assert ours.poll(PATIENCE)
    fleet = Fleet(urls, Access(""), PATIENCE)
    assert [fleet.get(url, "/state") for url in urls] == [{"groups": 1, "held": ours.recv()}] * 3
    trainer.kill()
    trainer.join(PATIENCE)
    successor = Sender(fleet)
    sent = successor.send(2.0)
    assert [fleet.get(url, "/state") for url in urls] == [{"groups": 1, "held": sent}] * 3
    successor.transport._leave()
    fleet.close()


class Work:
    """A broadcast over NCCL, which a stream waits for."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def wait(self) -> None:
        self._events.append("wait")


def test_told_death_aborts_an_nccl_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NCCL then does was not run: the group is a stand-in. A stream waits for no broadcast that will not end."""
    events: list[str] = []
    dead: set[str] = set()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/update_weights_from_distributed" and request.url.host == "b":
            dead.add("b")
        if request.url.host in dead:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json={"success": True})

    def broadcast(*_: Any, **__: Any) -> Work:
        events.append(f"broadcast to {len(fleet.urls)}")
        return Work(events)

    monkeypatch.setattr(distributed, "group_beside_the_default", lambda *_: "group")
    monkeypatch.setattr(distributed.dist, "broadcast", broadcast)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda group: events.append("leave"))
    monkeypatch.setattr(distributed.c10d, "_abort_process_group", lambda group: events.append("abort"))
    fleet = Fleet(["http://a", "http://b", "http://c"], Access(""), PATIENCE, on_lost=lambda *_: None)
    fleet._http = httpx.Client(transport=httpx.MockTransport(answer))
    sender = Sender(fleet)
    sender.transport._backend = "nccl"
    sender.send(1.0)
    assert list(fleet.urls) == ["http://a", "http://c"]
    assert events == ["broadcast to 3", "abort", "broadcast to 2", "wait"]
    fleet.close()
