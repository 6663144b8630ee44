"""Training with bound 0 equals synchronous training bit for bit: batches, losses, gradient norms and weights are those
of a plain driver that generates, trains, publishes and only then continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

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


Figures = list[dict[str, float]]


def same_training(figures: Figures, mine: Path, others: Figures, plain: Path) -> None:
    """Check equality bit for bit, and that the plain driver learnt something in every step."""
    assert len(figures) == len(others) == STEPS
    for one, other in zip(figures, others, strict=True):
        assert other["grad_norm"] > 0
        of_versions = "logprob_gap/lag"
        assert {name: one[name] for name in other if not name.startswith(of_versions)} == {
            name: value for name, value in other.items() if not name.startswith(of_versions)
        }
    start = tensors(catalog.resolve("builtin:tiny"))
    trained, expected = tensors(mine), tensors(plain)
    assert trained.keys() == expected.keys() == start.keys()
    for name, tensor in expected.items():
        assert not tensor.equal(start[name]), name
        assert trained[name].equal(tensor), name


def test_recorded_answers_train_the_same_weights(tmp_path: Path) -> None:
    """Batches equal every byte at bound 0, and at bound 3 in order, except for the versions, which the loss does not
    read."""
    (tmp_path / "config.json").write_text(tiny_config(**SHAPE, **{"rollout.max_new_tokens": 8}).model_dump_json())
    (outcomes,) = run_ranks("synchronous:recorded_answers", tmp_path, world=1)
    batches, figures = ({name: one[part] for name, one in outcomes.items()} for part in (0, 1))
    assert batches["bound-0"] == batches["plain"]
    assert list(map(without_versions, batches["bound-3"])) == list(map(without_versions, batches["plain"]))
    assert {step["staleness/max"] for step in figures["bound-0"]} == {0}
    assert 0 < max(step["staleness/max"] for step in figures["bound-3"]) <= 3
    for name in ("bound-0", "bound-3"):
        same_training(figures[name], tmp_path / name / "hf", figures["plain"], tmp_path / "plain" / "hf")


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
        ((batches, plain),) = run_ranks("synchronous:plain_on_engine", tmp_path, world=1)
    groups = [msgspec.json.decode(line, type=Group) for line in (tmp_path / "groups.jsonl").read_bytes().splitlines()]
    assert groups[: STEPS * 4] == [group for batch in batches for group in batch]
    same_training(figures, tmp_path / "run" / "hf", plain, tmp_path / "plain" / "hf")
