"""A plan from a recorded run uses the numbers that the run was made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.errors import RecordError
from asyncrl.observability import timeline
from asyncrl.observability.intervals import DECODE, PREFILL, TOOL, Interval
from asyncrl.observability.timeline import EpisodeTimeline, GroupTimeline
from asyncrl.planner import inputs
from asyncrl.planner.engine import EngineShape, SimulatedEngine, SimulatedRequest
from asyncrl.planner.fit import CONSTANT, PROMPTS, UNKNOWN, engine_times, fit, generating
from asyncrl.planner.lengths import Lengths
from scripts import sizes

SHAPE = EngineShape(0.02, 0.001, 64)
LENGTHS = Lengths(300, 0.8, 4096, 8, alike=0.5)
GROUPS, RATE, FIXED, PAUSE, TOOL_SECONDS = 240, 500.0, 2.0, 0.7, 3.0


def generated() -> list[GroupTimeline]:
    """Groups as one simulated engine generates them, at a concurrency that grows; odd ones end with a tool and one more
    token."""
    engine, now, left, found = SimulatedEngine(SHAPE), 0.0, {}, []
    number = 0
    while number < GROUPS or left:
        while number < GROUPS and len(left) < 2 + number // 5:
            for episode in LENGTHS.group(number):
                job = SimulatedRequest(episode.tokens - 1)
                left[job] = (number, now)
                engine.submit(job, now)
            number += 1
        now = engine.next_time()
        for job in engine.advance(now):
            group, began = left.pop(job)
            found.append((group, job.tokens, began, now))
    by_group: dict[int, list[EpisodeTimeline]] = {}
    for group, tokens, began, ended in found:
        spans = [Interval(PREFILL, began, began), Interval(DECODE, began, ended)]
        if group % 2:
            later = ended + TOOL_SECONDS
            spans += [Interval(TOOL, ended, later), Interval(PREFILL, later, later), Interval(DECODE, later, later)]
        by_group.setdefault(group, []).append(EpisodeTimeline(0.0, int(tokens) + 1 + group % 2, spans))
    return [
        GroupTimeline(f"g{group}", group, 0, "t", "training", 0, 0.0, 1.0, "committed", episodes)
        for group, episodes in sorted(by_group.items())
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = sizes.load("experiment=qwen3_8b", values=["engine.count=1", "trainer.data_parallel=2"])
    (tmp_path / "config.json").write_text(config.model_dump_json(by_alias=True))
    steps = []
    for step in range(12):
        tokens = 60_000 + 8_000 * (step % 4)
        busy = tokens / RATE + FIXED
        steps.append(
            {"time/step": busy + 4 + PAUSE, "time/wait_batch": 4, "time/pause": PAUSE, "tokens/trained": tokens}
        )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    return tmp_path


def test_fit_returns_what_the_run_was_made_with(run: Path) -> None:
    writer, groups = timeline.writer(run, timeline.ROLLOUT), generated()
    for group in groups:
        writer.write(group)
    writer.close()
    fitted = fit(run)
    found = fitted.fields
    assert fitted.notes == [PROMPTS]
    assert found["per_token"] == pytest.approx(SHAPE.per_token, rel=0.1)
    assert found["per_request"] == pytest.approx(SHAPE.per_request, rel=0.1)
    assert engine_times(groups, 2)[1] == pytest.approx(2 * found["per_request"])  # half as many requests in each
    # all tokens of an episode count, and those without a signal cost nothing: the rate is of episodes' tokens
    batch = 64 * 8 * sum(one.tokens for group in groups for one in group.episodes) / (GROUPS * 8)
    trained = 60_000 + 8_000 * 1.5
    assert found["train_rate"] * 4 == pytest.approx(RATE * batch / trained, rel=0.02)
    assert found["train_fixed"] == pytest.approx(FIXED, rel=0.05)
    assert found["pause"] == pytest.approx(PAUSE)
    assert found["mean"] == pytest.approx(300, rel=0.1)
    assert found["sigma"] == pytest.approx(0.8, rel=0.1)
    assert found["alike"] == pytest.approx(0.5, abs=0.1)
    assert found["turns"] == pytest.approx(1.5)
    assert found["tool_seconds"] == pytest.approx(TOOL_SECONDS)
    assert (found["gpus"], found["engine_gpus"], found["trainer_gpus"]) == (5, 1, 2)
    assert inputs.splits(inputs.parse(found | {"gpus": 8}))


EACH = generating(sizes.load("experiment=qwen3_8b").rollout, {"mean": 300.0, "turns": 2.0})
"""Unfinished episodes of a group in flight."""


def metrics_alone(run: Path, varied: bool) -> list[dict[str, float]]:
    """Steps of the run in `run`, as its metrics have them without timelines."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, step in enumerate(found):
        groups = 4 + (number % 4 if varied else 0)
        step |= {"groups/running": groups, "completion/length": 150, "episodes/turns": 2, "staleness/mean": 1.0}
        busy = step["time/step"] - 1
        step |= {"time/engine_busy": busy, "tokens/generated": SHAPE.rate(EACH * groups) * (busy - PAUSE)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return found


def test_metrics_alone_tell_speeds_and_mean_length_and_the_fit_says_what_they_do_not(run: Path) -> None:
    metrics_alone(run, varied=True)
    found = fit(run)
    assert found.notes == [PROMPTS, UNKNOWN]
    assert found.fields["per_token"] == pytest.approx(SHAPE.per_token, rel=0.01)
    assert found.fields["per_request"] == pytest.approx(SHAPE.per_request, rel=0.01)
    assert (found.fields["mean"], found.fields["turns"]) == (300, 2)
    assert found.fields["train_fixed"] == pytest.approx(FIXED, rel=0.05)
    assert not {"sigma", "alike", "tool_seconds"} & found.fields.keys()


def test_constant_concurrency_does_not_tell_what_a_larger_batch_costs(run: Path) -> None:
    steps = metrics_alone(run, varied=False)
    found = fit(run)
    assert CONSTANT in found.notes
    assert found.fields["per_request"] == 0
    assert found.fields["per_token"] == pytest.approx(SHAPE.per_token + 4 * EACH * SHAPE.per_request, rel=0.01)
    seconds = sum(step["time/step"] for step in steps[3:])
    assert f"and made {9 * 64 * 8 / seconds:.4g}" in found.check(seeds=1)


def test_too_short_a_run_is_refused(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(RecordError, match="has 0 steps"):
        fit(run)
