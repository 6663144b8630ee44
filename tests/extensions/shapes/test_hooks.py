"""The hooks for stages, on stand-ins for SGLang's classes, and for replicas (test_engine_shapes.py has engines)."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.extensions.shapes import hooks as stages


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The second rank of the second of three stages."""
    place = SimpleNamespace(pp_rank=1, pp_size=3, tp_rank=1, tp_size=2)
    monkeypatch.setattr(stages, "_parallel", lambda: place)
    return place


def scheduler_class() -> Any:
    class Scheduler:
        def __init__(self) -> None:
            self.did: list[Any] = []
            self.send_req_work: list[str] = []

        def process_input_requests(self, requests: list[str]) -> None:
            self.did.append(("process", *requests))

        def _pp_send_pyobj_to_next_stage(self, data: Any, async_send: bool = False) -> list[str]:
            self.did.append(("send", *data))
            return [f"sending {data}"]

        def _pp_commit_comm_work(self, work: list[str]) -> None:
            work.clear()

        def loop(self, requests: list[str]) -> None:
            """One turn of SGLang's event loop."""
            self.process_input_requests(requests)
            self._pp_commit_comm_work(self.send_req_work)
            self.send_req_work = self._pp_send_pyobj_to_next_stage(requests, async_send=True)

    stages.pass_on_first(SimpleNamespace(Scheduler=Scheduler))
    return Scheduler


@pytest.mark.usefixtures("stage")
def test_requests_are_passed_on_once_and_early() -> None:
    scheduler = scheduler_class()()
    for requests in (["join"], [], ["load"]):
        scheduler.loop(requests)
    assert scheduler.did == [
        ("send", "join"),
        ("process", "join"),
        ("send",),
        ("process",),
        ("send", "load"),
        ("process", "load"),
    ]
    assert scheduler.send_req_work == ["sending ['load']"]
    scheduler._pp_send_pyobj_to_next_stage(["outputs"])  # what else goes to the next stage
    assert scheduler.did[-1] == ("send", "outputs")


def test_the_last_stage_passes_nothing_on(stage: SimpleNamespace) -> None:
    stage.pp_rank = 2
    scheduler = scheduler_class()()
    scheduler.process_input_requests(["load"])
    assert scheduler.did == [("process", "load")]


@pytest.mark.usefixtures("stage")
def test_a_rank_has_its_number_in_the_engine() -> None:
    assert stages.first_rank() == 2

    class BaseTpWorker:
        def deserialize_own_rank(self, handles: list[int]) -> int:
            return handles[1]  # SGLang takes that of the rank in its stage

    class WeightUpdater:
        def init_weights_update_group(self, address: str, port: int, offset: int, world: int, name: str) -> int:
            return offset + 1

    stages.open_own_handle(SimpleNamespace(BaseTpWorker=BaseTpWorker))
    stages.join_as_own_rank(SimpleNamespace(WeightUpdater=WeightUpdater))
    assert BaseTpWorker().deserialize_own_rank(list(range(6))) == 3
    assert WeightUpdater().init_weights_update_group("host", 1, 1, 7, "weights") == 1 + 3


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_an_engine_fails_an_update_if_one_of_its_ranks_does(
    wrong: int | None, stage: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed as dist

    def gather(answers: list[Any], mine: Any, group: Any) -> None:
        answers[:] = [(rank != wrong, f"rank {rank}") for rank in range(len(answers))]

    monkeypatch.setattr(dist, "get_world_size", lambda: 6)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(stages, "_everybody", lambda: None)
    load = stages._of_all_stages(lambda self, request: SimpleNamespace(success=True, message="loaded"))
    assert load(None, "request").success == (wrong is None)
    assert load(None, "request").message == f"rank {wrong or 0}"
    stage.pp_size = 1
    assert load(None, "request").message == "loaded"


FLUSHES = """
import asyncio
from types import SimpleNamespace

import asyncrl.engine.serve
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import FlushCacheReqOutput
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin


async def flushed(busy):
    def send(request):
        for number in range(3):
            asyncio.get_running_loop().call_soon(asked.handle_recv, FlushCacheReqOutput(success=number != busy))

    asked = FanOutCommunicator(send, 3)
    manager = SimpleNamespace(flush_cache_communicator=asked, auto_create_handle_loop=lambda: None, mm_processor=None)
    return (await TokenizerControlMixin.flush_cache(manager)).success


print(*(asyncio.run(flushed(busy)) for busy in (None, 0, 1, 2)))
"""


def test_a_flush_fails_if_any_replica_refuses_it() -> None:
    """SGLang's own code asks three of them, and puts their answers together."""
    program = [sys.executable, "-c", FLUSHES, "--dp-size", "3"]
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # as every engine on a CPU
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines()[-1:] == ["True False False False"], done.stderr
