"""The whole system on the real parts, in every layout: what the engine wrote is what the trainer trains.

With a bound of 0 every token is written by the very weights that train it, so the log-probabilities of engine and
trainer must agree to float32 rounding at every step: before any update, and after each publish. That holds only if
loading, resharding, publishing, token alignment and temperature are all right, on both sides.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.timelines.files import EngineSpan, Started
from asyncrl.extensions.timelines.reader import TimelineReader
from asyncrl.extensions.view.inspection import cli
from asyncrl.metrics.fields import STEP, STEP_TRAINER, SUMMARY
from asyncrl.observability.intervals import DECODE
from asyncrl.observability.timeline import BatchTimeline, GroupTimeline, ProcessSpan, PublishTimeline
from tests.integration.books import balanced
from tests.integration.fleet import OF_EXTENSIONS
from tests.integration.running import lines, nothing_is_left, run

pytestmark = pytest.mark.integration

TRACED = "observe.engines=true"
PROCESSES = ("rollout", "router", "engine-0", "engine-1", "trainer 0", "trainer 1")
LAYOUTS = {
    "tp2-sp-two-engines-over-disk": [
        *("trainer.tensor_parallel=2", "trainer.sequence_parallel=true", "engine.count=2", "weights.transport=disk"),
        TRACED,
    ],
    "pp2-over-broadcast": ["trainer.pipeline_parallel=2", "weights.transport=distributed", "weights.staging=stream"],
}
FURTHER = {  # results/campaigns/README.md says which other tests hold what these repeat
    "tp2-two-engines": ["trainer.tensor_parallel=2", "engine.count=2"],
    "tp2-sp-two-engines": LAYOUTS["tp2-sp-two-engines-over-disk"][:3],
    "tp2-sp-over-broadcast": [*LAYOUTS["tp2-sp-two-engines-over-disk"][:2], "weights.transport=distributed"],
    "pp2-over-broadcast-two-engines": [*LAYOUTS["pp2-over-broadcast"], "engine.count=2"],
    **{
        f"{ranks}-over-{name}": [f"trainer.{field}=2", f"weights.transport={name}", "weights.verify_every=1"]
        for name in OF_EXTENSIONS
        for ranks, field in (("dp2", "data_parallel"), ("pp2", "pipeline_parallel"))
    },
}
CASES = [
    *(pytest.param(layout, id=name) for name, layout in LAYOUTS.items()),
    *(pytest.param(layout, id=name, marks=pytest.mark.campaign) for name, layout in FURTHER.items()),
]
SYNCHRONOUS = [
    "rollout.max_staleness=0",
    "run.max_steps=5",
    "eval.questions=8",
    "rollout.batch_groups=8",
    "rollout.group_size=8",
]


@pytest.mark.parametrize("layout", CASES)
def test_engine_and_trainer_agree_before_and_after_publishes(layout: list[str], tmp_path: Path) -> None:
    with traced(layout) as (collected, taken):
        steps = run(tmp_path / "run", *SYNCHRONOUS, *layout, *collected)
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5]
    assert max(step["staleness/max"] for step in steps) == 0
    assert max(step["logprob_gap/max"] for step in steps) < 1e-4
    assert steps[0]["time/verify"] > 0  # every run's first publish is verified
    assert min(step["grad_norm"] for step in steps) > 0  # the weights did change between publishes
    assert all(STEP.keys() <= step.keys() for step in steps)  # run() has checked that all are documented
    assert SUMMARY.keys() <= json.loads((tmp_path / "run" / "summary.json").read_text()).keys()
    nothing_is_left(tmp_path / "run")
    if TRACED in layout:
        steps_are_measured_and_one_is_profiled(tmp_path / "run", steps)
        everything_is_in_the_timeline(tmp_path / "run")
        assert {service for service, _ in taken} == {*PROCESSES}
        warnings = [line["warning"] for line in lines(tmp_path / "run" / "warnings.jsonl")]
        assert not [text for text in warnings if "observe" in text or "timeline" in text]


@contextmanager
def traced(layout: list[str]) -> Iterator[tuple[list[str], list[tuple[str, Any]]]]:
    """Yield further settings of a layout that is traced, and the spans that a collector gets, with their services."""
    if TRACED not in layout:
        yield [], []
        return
    from tests.extensions.observe.collector import collector

    with collector([200]) as (endpoint, taken):
        yield [f"observe.endpoint={endpoint}", "observe.profile=[2]"], taken


def steps_are_measured_and_one_is_profiled(run_dir: Path, steps: list[dict[str, Any]]) -> None:
    """Each step has its times by purpose, and every rank writes a trace of the step that is asked for."""
    for step in steps:
        assert STEP_TRAINER.keys() - step.keys() == {"flops/utilization"}
        parts = [step[f"time/{part}"] for part in ("forward", "backward", "communication", "optimizer")]
        if step["groups/trained"]:
            assert min(parts[0], parts[1], parts[3]) > 0
            assert step["flops/rank"] > 0
        # parts are means of ranks, and train is of rank 0, which may begin a step after the others
        assert sum(parts) < step["time/step"]
        assert 1e8 < step["memory/peak"] < 1e10
    traces = sorted((run_dir / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step-000002-rank-{rank}.json.gz" for rank in (0, 1)]
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert {"aten::mm", "_ScoresBackward"} & {event.get("name") for event in events}


def everything_is_in_the_timeline(run_dir: Path) -> None:
    """Every prompt has a trace through router and engine, and every process its phases."""
    from asyncrl.extensions.observe.spans import trace_id

    records = list(TimelineReader(run_dir).new())
    (run_id,) = [record.run_id for record in records if isinstance(record, Started)]
    services = defaultdict[str, set[str]](set)
    for span in (record for record in records if isinstance(record, EngineSpan)):
        services[span.trace].add(span.service)
    groups = [record for record in records if isinstance(record, GroupTimeline)]
    traced = [services[trace_id(run_id, one.uid)] for one in groups]
    assert sum("router" in found and len(found) > 1 for found in traced) >= 0.99 * len(groups)
    assert set.union(*traced) == {"router", "engine-0", "engine-1"}
    assert {one.purpose for one in groups} == {"training", "evaluation"}
    for group in (one for one in groups if one.purpose == "training"):
        assert {one.version for episode in group.episodes for one in episode.intervals if one.phase == DECODE} == {
            group.born
        }
    batches = [record for record in records if isinstance(record, BatchTimeline)]
    assert [one.step for one in batches] == [0, 1, 2, 3, 4]
    assert {uid for one in batches for uid in one.uids} <= {one.uid for one in groups}
    phases = {(one.process, one.name) for one in records if isinstance(one, ProcessSpan)}
    names = ("wait_batch", "train", "publish", "gather", "forward", "backward", "optimizer")
    assert {(f"trainer {rank}", name) for rank in (0, 1) for name in names} <= phases
    assert ("rollout", "start_up") in phases
    assert [record.version for record in records if isinstance(record, PublishTimeline)] == [1, 2, 3, 4, 5]
    file = run_dir.with_suffix(".trace")
    assert cli.main([str(run_dir), "--trace", str(file)]) == 0
    rows = {one["args"]["name"] for one in json.loads(file.read_text())["traceEvents"] if one["name"] == "process_name"}
    assert rows == {*PROCESSES}


@pytest.mark.campaign
def test_an_asynchronous_run_keeps_its_bound_and_its_word(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    steps = run(
        run_dir,
        "trainer.tensor_parallel=2",
        "engine.count=2",
        "rollout.max_staleness=4",
        "run.max_steps=40",
        "eval.every=20",
    )
    assert 0 < max(step["staleness/max"] for step in steps) <= 4
    summary = json.loads((run_dir / "summary.json").read_text())
    assert balanced(run_dir).groups.trained == 40 * 16
    assert sum(summary["staleness/histogram"].values()) == 40 * 16 * 16
    evaluations = [json.loads(line) for line in (run_dir / "eval.jsonl").read_text().splitlines()]
    assert evaluations[0]["version_max"] == 0
    assert evaluations[-1]["version_min"] == 40
    nothing_is_left(run_dir)
