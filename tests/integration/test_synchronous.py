"""Training with bound 0 equals synchronous training bit for bit: batches, losses, gradient norms and weights are those
of a plain driver that generates, trains, publishes and only then continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncrl.models import catalog
from asyncrl.schema import Group
from tests.fakes import tiny_config
from tests.integration.books import tensors
from tests.integration.fleet import engines
from tests.integration.ranks import run_ranks
from tests.integration.recorder import FILE
from tests.integration.running import run
from tests.rollout.machinery import without_versions

pytestmark = pytest.mark.integration

STEPS = 6
ROOT = str(Path(__file__).parents[2])
SHAPE = {"rollout.batch_groups": 4, "rollout.group_size": 4, "run.max_steps": STEPS, "eval.questions": 0}


class Outcome:
    """Results of a driver."""

    def __init__(self, folder: Path) -> None:
        groups = folder / "groups.json"
        self.batches = msgspec.json.decode(groups.read_bytes(), type=list[list[Group]]) if groups.exists() else []
        figures = folder / "figures.json"
        self.figures: list[dict[str, float]] = json.loads(figures.read_text()) if figures.exists() else []
        self.weights = tensors(folder / "hf")


def driven(how: str, folder: Path) -> None:
    """Run the rank, which writes an outcome for each driver."""
    run_ranks("rank_synchronous.py", how, str(folder), world=1)


def same_training(figures: list[dict[str, float]], mine: dict[str, torch.Tensor], plain: Outcome) -> None:
    """Check equality bit for bit, and that the plain driver learnt something in every step."""
    assert len(figures) == len(plain.figures) == STEPS
    for one, other in zip(figures, plain.figures, strict=True):
        assert other["grad_norm"] > 0
        of_versions = "logprob_gap/lag"
        assert {name: one[name] for name in other if not name.startswith(of_versions)} == {
            name: value for name, value in other.items() if not name.startswith(of_versions)
        }
    start = tensors(catalog.resolve("builtin:tiny"))
    assert mine.keys() == plain.weights.keys() == start.keys()
    for name, tensor in plain.weights.items():
        assert not tensor.equal(start[name]), name
        assert mine[name].equal(tensor), name


def test_recorded_answers_train_the_same_weights(tmp_path: Path) -> None:
    """Batches equal every byte at bound 0, and at bound 3 in order, except for the versions, which the loss does not
    read."""
    (tmp_path / "config.json").write_text(tiny_config(**SHAPE, **{"rollout.max_new_tokens": 8}).model_dump_json())
    driven("recorded", tmp_path)
    plain, synchronous, ahead = (Outcome(tmp_path / name) for name in ("plain", "bound-0", "bound-3"))
    assert synchronous.batches == plain.batches
    assert list(map(without_versions, ahead.batches)) == list(map(without_versions, plain.batches))
    assert {step["staleness/max"] for step in synchronous.figures} == {0}
    assert 0 < max(step["staleness/max"] for step in ahead.figures) <= 3
    for found in (synchronous, ahead):
        same_training(found.figures, found.weights, plain)


def test_bound_0_is_a_plain_driver_on_the_real_engine(tmp_path: Path, monkeypatch: Any) -> None:
    """One request runs at a time, so that the engine draws the same random numbers for the same tokens, and multiplies
    matrices of the same number of rows."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    monkeypatch.setenv(FILE, str(tmp_path / "groups.jsonl"))
    one_by_one = {"rollout.max_staleness": 0, "rollout.max_running_groups": 1, "engine.max_running_requests": 1}
    overrides = [f"{name}={value}" for name, value in {**SHAPE, **one_by_one}.items()]
    figures = run(tmp_path / "run", *overrides, "rollout.accept=tests.integration.recorder:take")
    with engines(tmp_path, *overrides) as fleet:
        (tmp_path / "config.json").write_text(fleet.config.model_dump_json())
        fleet.addresses.write(tmp_path)
        driven("engine", tmp_path)
    plain = Outcome(tmp_path / "plain")
    groups = [msgspec.json.decode(line, type=Group) for line in (tmp_path / "groups.jsonl").read_bytes().splitlines()]
    assert groups[: STEPS * 4] == [group for batch in plain.batches for group in batch]
    same_training(figures, tensors(tmp_path / "run" / "hf"), plain)
