"""Trainers that start again: what they change after they were out of memory, and what they publish."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.network.addresses import OUT_OF_MEMORY, TRAINING
from asyncrl.trainer.recovery import CatchingUp, Recovery, Start, _recovery, adapted
from asyncrl.weights.publish import UNSENT, Staged, StagedPublisher
from tests.fakes import tiny_config


def test_micro_batches_halve_then_all_is_recomputed(tmp_path: Path) -> None:
    config = tiny_config(**{"trainer.micro_batch_tokens": 4096})
    assert adapted(config, tmp_path) == (config, "")
    told = []
    for times in range(1, 4):
        (tmp_path / OUT_OF_MEMORY).write_text(str(times))
        trainer = adapted(config, tmp_path)[0].trainer
        told.append((trainer.micro_batch_tokens, trainer.recompute.granularity))
    assert told == [(4096, "none"), (2048, "none"), (2048, "full")]


class Sent(StagedPublisher):
    def __init__(self) -> None:
        self.versions: list[int] = []

    def stage(self, version: int) -> Staged:
        self.versions.append(version)
        return Staged(version, {})

    def complete(self, staged: Staged) -> dict[str, float]:
        return {"pause": 1.0}


def test_nothing_is_published_before_the_served_version() -> None:
    sent, told = Sent(), list[str]()
    recovery = Recovery(served=5, written=5, updating=True, began=0.0)
    catching_up = CatchingUp(sent, Start(3, None, recovery), None, lambda text, _: told.append(text))  # type: ignore[arg-type]
    figures = [catching_up.publish(version) for version in (3, 4, 5, 6)]
    assert sent.versions == [5, 6]
    assert figures == [UNSENT, UNSENT, {"pause": 1.0}, {"pause": 1.0}]
    (line,) = told
    assert "2 steps since version 3 were trained again; the weights were not compared" in line


def test_engines_without_memory_are_not_asked_for_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_DIED_AT", "1")
    source: Any = SimpleNamespace(status=lambda: {"version": 5, "held": 0.0})
    fleet: Any = SimpleNamespace(inherit=lambda: None)
    found = []
    for trainers_turn in (False, True):
        if trainers_turn:
            (tmp_path / TRAINING).touch()
        rank: Any = SimpleNamespace(run_dir=tmp_path)
        found.append(_recovery(rank, source, fleet))
    assert [(one.served, one.updating) for one in found] == [(5, False), (5, True)]


@pytest.mark.parametrize("first", [True, False])
def test_rank_0_alone_asks_an_engine_what_it_holds(first: bool) -> None:
    asked = list[str]()

    def post(url: str, *_: object) -> dict[str, list[Any]]:
        asked.append(url)
        return {"ranks": []}

    fleet: Any = SimpleNamespace(serving=["http://first"], post=post)
    recovery = Recovery(served=5, written=5, updating=False, began=0.0)
    catching_up = CatchingUp(Sent(), Start(3, None, recovery), fleet, (lambda *_: None) if first else None)
    for version in (4, 5, 6):
        catching_up.publish(version)
    assert asked == (["http://first"] if first else [])
