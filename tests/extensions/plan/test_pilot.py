"""What the launcher does with the decisions of an elastic run (and tests/integration/test_elastic_stubs.py)."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engine.registry import Registry
from asyncrl.errors import ConfigError, RecordError
from asyncrl.extensions.plan import pilot as elastic
from asyncrl.extensions.plan.elastic import ElasticDecision
from asyncrl.extensions.plan.pilot import ELASTIC, ElasticPilot, free_gpus
from asyncrl.jsonl import Tail
from asyncrl.launch.placement import imagined, place
from asyncrl.leases import LEASE_SECONDS
from asyncrl.network.ports import free_port
from tests.fakes import ALONE, JOB, addresses, tiny_config

FIGURES = {"trainer_waits": 0.5, "batches_made": 1.0, "length": 100.0, "length_growth": 0.0}
GPUS = {"trainer.device": "cuda", "engine.device": "cuda", "engine.tensor_parallel": 2}


class Decided:
    """A pilot whose controller decides what it is told."""

    def __init__(
        self,
        folder: Path,
        *,
        gpus: int = 0,
        command: list[str] | None = None,
        jobs: EngineJobs | None = None,
        **changes: Any,
    ) -> None:
        config = tiny_config(**{"plan.elastic": "act", "plan.max_engines": 4, **changes})
        (folder / "logs").mkdir()
        self.registry, self.folder = Registry(folder), folder
        self.registry.clear()
        self.placement = place(config, imagined(config, 1, gpus))
        here = addresses(config.engine.count, gpus, rollout=f"http://127.0.0.1:{free_port('127.0.0.1')}")
        cluster: Any = SimpleNamespace(engine_jobs=lambda *_: jobs)
        command = command or [sys.executable, "-c", "0"]
        self.pilot = ElasticPilot(
            config, (config.model_extra or {})["plan"], folder, here, self.placement, cluster, command
        )

    def decide(self, action: str, before: float, after: float) -> str:
        """Return what was done."""
        before_it = len(self.lines())
        self.begin(action, before, after)
        self.wait_for(lambda: len(self.lines()) > before_it)
        line = self.lines()[-1]
        assert (line["step"], line["action"], line["figures"]) == (7, action, FIGURES)
        assert line["reason"].startswith(action.replace("_", " "))
        return str(line["done"])

    def begin(self, action: str, before: float, after: float) -> None:
        """Let the controller decide once, and the launcher poll."""
        decision = ElasticDecision(7, 1.0, action, before, after, "engines", 0.2, FIGURES)
        steps = iter([None])
        self.pilot._observer = SimpleNamespace(new=lambda: steps)  # type: ignore[assignment]
        self.pilot._controller = SimpleNamespace(observe=lambda _: decision)  # type: ignore[assignment]
        self.pilot.each_poll()

    def lines(self) -> list[dict[str, Any]]:
        return Tail(self.folder / ELASTIC)()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Poll until something is so."""
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline
            time.sleep(0.05)
            self.pilot.each_poll()


def test_advice_is_written_and_nothing_is_done(tmp_path: Path) -> None:
    made = Decided(tmp_path, **{"plan.elastic": "advise"})
    assert made.decide("remove_engine", 1, 0) == "advice only (plan.elastic=advise)"
    assert made.registry.leaving() == set()


def test_joined_engines_leave_first_and_by_machine(tmp_path: Path) -> None:
    made = Decided(tmp_path, **{"engine.count": 2})
    for number, host in enumerate(["a", "b", "a"]):
        made.registry.lease_of(f"http://guest:{number}", host=host).renew()
    left = ["http://guest:1", "http://guest:2", "http://guest:0", "http://127.0.0.1:20001", "http://127.0.0.1:20000"]
    for count, url in enumerate(left, 1):
        assert made.decide("remove_engine", 6 - count, 5 - count) == f"asked to leave: {url}"
        assert made.registry.leaving() == set(left[:count])


def test_added_engine_gets_free_gpus_and_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"
    made = Decided(tmp_path, gpus=8, command=[sys.executable, "-c", program], **GPUS)
    assert free_gpus(made.placement) == ["3", "4", "5", "6", "7"]  # one rank of the trainer, two of the engine
    assert "elastic-0.log" in made.decide("add_engine", 1, 2)
    assert "elastic-1.log" in made.decide("add_engine", 2, 3)
    assert made.decide("add_engine", 3, 4) == "failed: an engine takes 2 GPUs, and 1 of this machine are free"
    logs, deadline = [tmp_path / "logs" / f"elastic-{number}.log" for number in (0, 1)], time.monotonic() + 30
    while [log.read_text() for log in logs] != ["3,4\n", "5,6\n"]:
        assert time.monotonic() < deadline, [log.read_text() for log in logs]
        time.sleep(0.05)
    own = made.placement.urls()["engines"][0]
    made.registry.ask_to_leave(own)
    made.registry.let_go(own)
    assert made.decide("add_engine", 3, 4).startswith("failed"), "it has not stopped"
    made.registry.stopped(own)
    assert "elastic-2.log" in made.decide("add_engine", 3, 4)
    monkeypatch.setattr(elastic, "SECONDS", 1.0)
    began = time.monotonic()
    made.pilot.end()
    assert time.monotonic() - began < 10.0, "the deadline is for all of them together"
    assert [process.poll() is not None for process, _ in made.pilot._added] == [True] * 3


class EngineJobs:
    """Submits nothing, and says so once `done` is set."""

    done: str | None = None

    def __init__(self) -> None:
        self.asked = list[tuple[int, int]]()
        self.ended = False

    def submit(self, count: int, step: int) -> EngineJobs:
        self.asked.append((count, step))
        return self

    def poll(self) -> str | None:
        return self.done

    def cancel(self) -> str:
        return "the run has ended"

    def end(self) -> None:
        self.ended = True


def test_whole_machine_jobs_are_submitted_beside_decisions(tmp_path: Path) -> None:
    jobs = EngineJobs()
    made = Decided(tmp_path, gpus=8, jobs=jobs, **GPUS, **JOB, **{"cluster.gpus": 8})
    assert made.pilot._unit == 4
    made.begin("add_engine", 1, 6)
    assert jobs.asked == [(2, 7)]
    assert made.decide("remove_engine", 1, 0).startswith("asked to leave")
    assert len(made.lines()) == 1
    jobs.done = "submitted job 77"
    made.wait_for(lambda: len(made.lines()) == 2)
    assert made.lines()[-1]["done"] == "submitted job 77"
    jobs.done = None
    made.begin("add_engine", 1, 5)
    made.pilot.end()
    assert made.lines()[-1]["done"] == "the run has ended"
    assert jobs.ended


def test_rollout_process_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert elastic.ANSWER < LEASE_SECONDS / 4
    monkeypatch.setattr(elastic, "ANSWER", 0.2)
    made = Decided(tmp_path)
    with socket.create_server(("127.0.0.1", int(made.pilot._addresses.rollout.rpartition(":")[2]))):
        began = time.monotonic()
        assert made.decide("raise_lead", 1, 2).endswith("timed out")
        assert time.monotonic() - began < elastic.SECONDS / 2


def test_errors_of_the_system_are_reported_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Decided(tmp_path, command=[str(tmp_path / "no such program")])
    assert "No such file or directory" in made.decide("add_engine", 1, 2)
    (tmp_path / ELASTIC).unlink()
    (tmp_path / ELASTIC).mkdir()
    made.begin("remove_engine", 1, 0)
    assert "cannot write elastic.jsonl" in capsys.readouterr().err
    assert made.registry.leaving()

    def fails(_: Any) -> Any:
        raise ZeroDivisionError

    made.pilot._observer = SimpleNamespace(new=lambda: [None])  # type: ignore[assignment]
    made.pilot._controller = SimpleNamespace(observe=fails)  # type: ignore[assignment]
    made.pilot.each_poll()
    assert "plan.elastic has no effect from now on: ZeroDivisionError()" in capsys.readouterr().err


def test_failed_action_is_told_and_bad_timelines_end_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Decided(tmp_path)
    assert made.decide("raise_lead", 1, 2).startswith("failed: http://127.0.0.1:")

    def damaged() -> Any:
        raise RecordError("the timeline is damaged")

    made.pilot._observer = SimpleNamespace(new=damaged)  # type: ignore[assignment]
    made.pilot.each_poll()
    made.pilot.each_poll()
    assert capsys.readouterr().err.count("plan.elastic has no effect from now on: the timeline is damaged") == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"timelines.record": False}, "timelines.record"),
        ({"plan.min_engines": 3}, "plan.min_engines"),
        ({"engine.count": 3, "plan.max_engines": 2}, "plan.max_engines"),
        ({"cluster.placement": "shared"}, "cluster.placement"),
        (ALONE, "mode"),
    ],
)
def test_what_cannot_be_elastic_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        tiny_config(**{"plan.elastic": "advise", **changes})
    assert refused.value.field == field
    tiny_config(**{"plan.elastic": "off", **changes})
