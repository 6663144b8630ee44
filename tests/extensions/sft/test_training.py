"""Which rows a version trains, what mode=sft refuses, and who may train without rewards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.extensions.sft.training import RowOrder, SftBatches, Supervised
from asyncrl.launch.placement import imagined, place
from asyncrl.launch.plan import plan
from asyncrl.schema import Batch, Group, Trajectory, decode_batch
from tests.fakes import addresses, changed, compose_values, tiny_config


@pytest.mark.parametrize(("batch", "epochs"), [(4, 3), (10, 2), (7, 1), (25, 3)])
def test_every_row_is_trained_once_in_each_epoch(batch: int, epochs: int) -> None:
    order = RowOrder(5, 15, batch, seed=1, epochs=epochs)
    assert order.steps == -(-10 * epochs // batch)
    seen = [row for version in range(order.steps) for row in order.rows(version)]
    for epoch in range(epochs):
        assert sorted(seen[10 * epoch : 10 * epoch + 10]) == list(range(5, 15))
    assert order.epochs(order.steps) == epochs


def test_order_is_a_function_of_the_version_alone() -> None:
    """So a resumed run, in whatever layout, trains the rows that it would have trained."""
    whole, resumed = (RowOrder(0, 50, 8, seed=3, epochs=None) for _ in range(2))
    before = [whole.rows(version) for version in range(40)]
    assert [resumed.rows(version) for version in reversed(range(20, 40))] == before[:19:-1]
    rows = [row for batch in before for row in batch]
    assert rows[:50] != rows[50:100]
    assert Counter(rows[:300]) == dict.fromkeys(range(50), 6)
    assert RowOrder(0, 50, 8, seed=4, epochs=None).rows(0) != before[0]
    assert whole.steps is None


def test_parts_of_a_batch_have_its_rows_and_figures_once() -> None:
    def groups(rows: list[int], version: int) -> list[Group]:
        return [Group(str(row), row, [row], [Trajectory([], 0.0)], "chat") for row in rows]

    source = SftBatches(RowOrder(0, 9, 5, seed=0, epochs=None), groups, end=2)

    def batch(*place: int) -> Batch:
        return decode_batch(source.batch(1, *place, interrupt=lambda: False))

    whole, parts = batch(), [batch(part, 2) for part in range(2)]
    assert [one for part in parts for one in part.groups] == whole.groups
    assert [part.last for part in parts] == [False, True]
    assert (parts[0].rollout, parts[1].rollout) == ({}, whole.rollout)
    assert whole.rollout["samples/generated"] == 5.0


def test_checkpoint_of_other_rows_is_not_gone_on_with() -> None:
    hooks = object.__new__(Supervised)
    hooks._state = {"rows": "a", "batch": 4, "seed": 0}
    hooks.restore(hooks.state())
    for state, problem in (
        ({"rows": "b", "batch": 4, "seed": 0}, "rows of task.train_file"),
        ({"rows": "a", "batch": 8, "seed": 0}, "rollout.batch_groups was 8, and is 4"),
        ({"rows": "a", "batch": 4, "seed": 1}, "run.seed was 1, and is 0"),
    ):
        with pytest.raises(ValueError, match=problem):
            hooks.restore(msgspec.json.encode(state))


def warmup(**changes: Any) -> Any:
    return load(
        changed(compose_values("experiment=warmup", "model=tiny"), {"task.train_file": "/rows.jsonl", **changes})
    )


def test_experiment_runs_trainers_alone() -> None:
    config = warmup(**{"trainer.data_parallel": 2})
    placement = place(config, imagined(config, 1, 0))
    specs = plan(config, addresses(), placement, Path("/runs/r"))
    assert [spec.name for spec in specs] == ["trainer-0", "trainer-1"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"task.kind": "file"}, r"task\.kind: .*set task=chat"),
        ({"algo.advantage": {"name": "gae"}}, r"algo\.advantage: .*There are no rewards: leave it unset"),
        ({"rollout.temperature": 0.8}, r"rollout\.temperature: .*set 1\.0"),
        ({"algo.mini_batches": 2}, r"algo\.epochs × algo\.mini_batches: .*set 1"),
        ({"algo.kl.coefficient": 0.1}, r"algo\.kl\.coefficient: .*set 0"),
        ({"algo.aggregation": "constant"}, r"algo\.aggregation: .*token or sequence"),
    ],
)
def test_settings_without_meaning_for_sft_are_refused(changes: dict[str, Any], problem: str) -> None:
    if "algo.advantage" in changes:
        pytest.importorskip("asyncrl.extensions.critic")
    with pytest.raises(ConfigError, match=problem):
        warmup(**changes)


def test_other_modes_have_no_epochs() -> None:
    with pytest.raises(ConfigError, match=r"sft\.epochs: .*mode=sft only"):
        tiny_config(sft={"epochs": 2})
