"""The preflight of a job: the questions are asked of nobody here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import LaunchError
from asyncrl.extensions.reach import network
from asyncrl.extensions.reach.programs import AllReduce, Reach
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Placement
from asyncrl.models import catalog
from tests.launch.checks.worlds import of_job

BOTH = {"trainer.data_parallel": 2, "cluster.trainer_nodes": 2}


class Answers:
    """Answers that the machines of a job would give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: str = "", unseen: Sequence[str] = ()) -> None:
        self.problem, self.unseen = problem, list(unseen)
        self.folders: set[Path] = set()
        self.summed = False
        monkeypatch.setattr(network, "ask_reach", self.reach)
        monkeypatch.setattr(network, "ask_allreduce", self.allreduce)

    def reach(self, cluster: Cluster, folders: Iterable[Path], models: Iterable[Path], run_id: str) -> Any:
        if self.problem == "fails":
            raise LaunchError("cannot start it")
        self.folders, names = set(folders), [node.name for node in cluster.nodes]
        told = Reach(names[0], "10.0.0.0", 1, names[1:], 1.0, {}, {})
        return told, {name: {"problem": self.problem, "unseen": self.unseen} for name in names}

    def allreduce(self, cluster: Cluster, placement: Placement, *, gpu: bool) -> Any:
        self.summed = True
        names = [node.name for node in cluster.nodes]
        told = AllReduce("nccl" if gpu else "gloo", names, "10.0.0.0", 1, {}, 1.0)
        return told, {name: {"problem": "", "seconds": 0.1} for name in names}


def test_machines_of_a_job_are_asked_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch)
    findings = of_job(tmp_path, 2, **BOTH)
    assert {findings[field].level for field in ("network", "all-reduce", "ports", "cluster.gpus")} == {"ok"}
    assert answers.folders == {tmp_path}  # the nearest that there is
    assert "network" not in of_job(tmp_path, 1)


def test_trainers_on_one_machine_need_no_network_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch)
    assert of_job(tmp_path, 2)["network"].level == "ok"
    assert not answers.summed


def test_sum_is_not_awaited_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, "timed out")
    assert of_job(tmp_path, 2, **BOTH)["cluster.interface"].level == "error"
    assert not answers.summed


def test_unseen_folder_is_told_by_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    answers = Answers(monkeypatch, unseen=[str(shared)])
    findings = of_job(tmp_path, 2, **{"weights.transport": "disk", "weights.folder": str(shared / "weights")})
    assert findings["weights.folder"].value.startswith(("on node0, ", "on node1, "))
    assert answers.folders == {tmp_path, shared}
    model = catalog.resolve("builtin:tiny")
    Answers(monkeypatch, unseen=[str(model)])
    assert of_job(tmp_path, 2)["model.path"].level == "error"


def test_a_program_that_cannot_be_started_there_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Answers(monkeypatch, "fails")
    assert of_job(tmp_path, 2)["cluster"].value == "cannot start it"
