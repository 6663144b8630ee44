"""A run writes exactly the metrics that metrics/fields.py describes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.jsonl import append
from asyncrl.lookup import classes
from asyncrl.metrics.fields import EVAL, EVAL_BY_K, STEP, STEP_BY_ROLE, STEP_BY_TASK, SUMMARY, SUMMARY_BY_SET, unknown
from asyncrl.metrics.record import StepLog, accuracies
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.schema import Batch, Prompt, Trajectory, Turn
from tests.fakes import Clock, FakeClient, LengthTask, completion, group, tiny_config, trajectory
from tests.metrics.steps import GROUPS, SENT, policy_figures, rollout_figures, stepped


def log_of(clock: Clock, *sinks: Any, since: float = 10.0, tasks: tuple[str, ...] = ("length",)) -> StepLog:
    return StepLog(list(sinks), started_at=time.time() - since, tasks=tasks, clock=clock)


def filled(patterns: dict[str, str], *values: object) -> list[str]:
    """The fields that a pattern of names documents."""
    return [re.sub("<.*>", str(value), pattern) for pattern in patterns for value in values]


def test_fields_are_known_by_their_names_and_patterns() -> None:
    known = ["loss", "entropy", "logprob_gap/lag3", "reward/part/code/passed", "reward/mean/sort"]
    known += [field for kind in classes({}).values() for field in kind.metrics if "<" not in field]
    assert unknown(known) == []
    assert unknown(["los", "loss2", "reward/part/", "part", ""]) == ["los", "loss2", "reward/part/", "part", ""]


def test_step_record_has_the_documented_fields_and_no_other() -> None:
    record = stepped(log_of(clock := Clock(50.0)), clock, 1, GROUPS)
    assert sorted(record) == sorted(STEP)


def test_step_record_of_tasks_has_the_documented_fields() -> None:
    log = log_of(clock := Clock(50.0), tasks=("sort", "sum", "absent"))
    groups = [group(0, [0.0, 1.0, 1.0], task="sort"), group(1, [1.0, 1.0], task="sum"), group(2, [3.0], task="sum")]
    record = stepped(log, clock, 1, groups)
    assert sorted(record) == sorted([*STEP, *filled(STEP_BY_TASK, "sort", "sum"), "groups/batch/absent"])
    assert [record[f"groups/batch/{task}"] for task in ("sort", "sum", "absent")] == [1, 2, 0]
    assert record["reward/mean/sort"] == pytest.approx(2 / 3)
    assert record["reward/mean/sum"] == pytest.approx(5 / 3)  # a mean over trajectories, as reward/mean is
    assert (record["groups/signal/sort"], record["groups/signal/sum"]) == (1.0, 0.0)


def test_step_record_of_roles_has_rewards_and_cuts() -> None:
    def turn(role: str, reward: float, **changes: Any) -> Turn:
        return Turn([], completion(), reward, role=role, **changes)

    game = [turn("a", 1.0), turn("b", -1.0, begins=True), turn("a", 0.0), turn("a", 0.0, begins=True)]
    forked = [turn("a", 2.0), turn("a", 4.0, begins=True, fork=-1)]
    played = group(0, [0.0, 0.0])
    played = msgspec.structs.replace(played, trajectories=[Trajectory(game, 0.5), Trajectory(forked)])
    record = stepped(log_of(clock := Clock(50.0)), clock, 1, [played])
    assert sorted(record) == sorted([*STEP, *filled(STEP_BY_ROLE, "a", "b")])
    assert record["reward/role/a"] == pytest.approx((1.5 + 3.0) / 2)  # the mean of the ways that fork
    assert record["reward/role/b"] == pytest.approx(-0.5)
    assert record["episodes/turns"] == 3.0
    assert record["episodes/cuts"] == 0.5  # a's third turn; neither b's first, nor the fork


def test_summary_has_the_documented_fields_and_no_other() -> None:
    log = log_of(clock := Clock(50.0))
    stepped(log, clock, 1, GROUPS)
    added = {"reason", "transport", "ledger"}
    assert sorted(log.summary(10).keys() | added | accuracies([], []).keys()) == sorted(SUMMARY)


def test_summary_accuracy_is_the_mean_over_sets() -> None:
    assert accuracies([], []) == {"accuracy/before": None, "accuracy/after": None}
    line = {"set": "copy", "accuracy": 0.25}
    assert accuracies([line], [{**line, "accuracy": 0.5}]) == {"accuracy/before": 0.25, "accuracy/after": 0.5}
    other = {"set": "sum", "accuracy": 0.75}
    found = accuracies([line, other], [other, other | {"set": "copy"}])
    assert (found["accuracy/before"], found["accuracy/after"]) == (0.5, 0.75)
    assert (found["accuracy/before/copy"], found["accuracy/before/sum"]) == (0.25, 0.75)
    assert sorted(found) == sorted(["accuracy/before", "accuracy/after", *filled(SUMMARY_BY_SET, "copy", "sum")])


def test_evaluation_line_has_the_documented_fields_and_no_other() -> None:
    async def attempts(prompt: Prompt, sessions: Sequence[object]) -> list[Trajectory]:
        return [trajectory(1.0) for _ in sessions]

    async def line(samples: int) -> dict[str, Any]:
        client: Any = FakeClient()
        settings, sets = tiny_config(**{"eval.samples": samples}).eval, {"copy3": [Prompt("e", [12, 11], {}, "copy3")]}
        (found,) = await Evaluations(attempts, client, {"copy3": LengthTask()}, sets, settings, lambda _: None).now()
        return found

    assert sorted(asyncio.run(line(samples=0))) == sorted(EVAL)
    assert sorted(asyncio.run(line(samples=5))) == sorted([*EVAL, *filled(EVAL_BY_K, 1, 2, 4)])


def test_figures_of_a_step_by_hand() -> None:
    log = log_of(clock := Clock(50.0))
    first, second = (stepped(log, clock, version, GROUPS) for version in (3, 4))
    assert (second["step"], second["version"]) == (4, 4)
    assert second["reward/mean"] == 0.75
    assert second["reward/std"] == pytest.approx(0.1875**0.5)
    assert second["groups/signal"] == 0.5
    assert second["prompt/length"] == 3.0
    assert second["completion/length"] == 3.0
    assert second["completion/truncated"] == 0.5
    assert (second["staleness/mean"], second["staleness/max"]) == (2.0, 3)  # trained as batch 3; versions 0 and 2
    assert second["staleness/mixed"] == 0.5
    assert (second["time/wait_batch"], second["time/train"], second["time/publish"]) == (1.0, 3.0, 0.5)
    assert second["time/step"] == 4.5
    assert (second["time/pause"], second["bytes/published"]) == (0.25, 100.0)
    assert second["time/since_start"] == pytest.approx(10 + 9, abs=0.5)
    assert first["time/wait_batch"] == 0.0  # the run was starting up
    assert first["time/step"] == 3.5


def test_summary_by_hand() -> None:
    log = log_of(clock := Clock(50.0))
    for version, reward in enumerate([0.0, 1.0, 1.0, 2.0], start=1):
        stepped(log, clock, version, [group(0, [reward] * 2, versions=(0,))], **{"tokens/trained": 10.0})
    found = log.summary(window=2)
    duration = 3.5 + 3 * 4.5
    assert found["steps"] == 4
    assert (found["reward/first"], found["reward/last"]) == (0.5, 1.5)
    assert (found["tokens/generated"], found["tokens/trained"]) == (80, 40.0)
    assert found["tokens_per_s/trained"] == pytest.approx(40 / duration)
    assert found["samples_per_s"] == pytest.approx(16 / duration)
    assert found["staleness/histogram"] == {"0": 2, "1": 2, "2": 2, "3": 2}
    assert found["share/trainer_idle"] == pytest.approx(3 / duration)
    assert found["share/publish"] == pytest.approx(2 / duration)
    assert found["share/engine_busy"] == pytest.approx(6 / duration)
    assert (found["pause/mean"], found["step_time/median"]) == (0.25, 4.5)
    assert found["time/start_up"] == pytest.approx(10 + 1, abs=0.5)
    assert found["time/total"] == pytest.approx(10 + 18, abs=0.5)
    assert json.loads(json.dumps(found)) == found


def test_span_running_twice_in_a_step_adds_up() -> None:
    log = log_of(clock := Clock(50.0))
    with log.span("train"):
        clock.now += 1
    assert stepped(log, clock, 1, GROUPS)["time/train"] == 4.0
    assert stepped(log, clock, 2, GROUPS)["time/train"] == 3.0


def test_sinks_get_every_record_and_jsonl_can_be_followed(tmp_path: Path) -> None:
    log = log_of(clock := Clock(50.0), partial(append, tmp_path / "metrics.jsonl"))
    records = []
    for version in (1, 2):
        records.append(stepped(log, clock, version, GROUPS))
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == records


def test_outer_span_goes_on_after_an_inner_one() -> None:
    told: list[tuple[str, int]] = []
    log = StepLog([], started_at=0.0, begins=lambda *span: told.append(span))
    with log.span("wait_batch"):
        with log.span("release"):
            pass
        with pytest.raises(ValueError, match="failed"), log.span("save"):
            raise ValueError("failed")
    with log.span("train"):
        pass
    assert told == [(name, 1) for name in ("wait_batch", "release", "wait_batch", "save", "wait_batch", "train")]


def test_spans_are_told_with_their_batch_and_wall_clock_times() -> None:
    told: list[tuple[str, int, float, float]] = []
    now = time.time()
    log = StepLog([], started_at=now, ended=lambda *span: told.append(span))
    with log.span("wait_batch"):
        pass
    with log.span("publish"):
        time.sleep(0.01)
    log.step(1, Batch(0, GROUPS, rollout_figures()), policy_figures(), SENT)
    with log.span("save"):
        pass
    assert [(name, batch) for name, batch, *_ in told] == [
        ("wait_batch", 0),
        ("publish", 0),
        ("gather", 0),
        ("save", 1),
    ]
    assert all(now <= start <= end < now + 60 for _, _, start, end in told)
    assert told[1][3] - told[1][2] >= 0.01
    assert (told[2][2], told[2][3] - told[2][2]) == (told[1][2], pytest.approx(SENT["fill"], abs=1e-4))
