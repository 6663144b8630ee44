"""A plan from a recorded run uses the numbers that the run was made with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import RecordError
from asyncrl.extensions.plan import inputs
from asyncrl.extensions.plan.engine import EngineShape, SimulatedEngine, SimulatedRequest
from asyncrl.extensions.plan.fit import (
    APART,
    CONSTANT,
    PROMPTS,
    SIZES,
    TRAINER,
    UNKNOWN,
    engine_times,
    fit,
    generating,
    in_words,
    length_fields,
    outside,
    refuse,
    trainer_times,
)
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.timelines import files
from asyncrl.observability.intervals import DECODE, PREFILL, RETRY, TOOL, Interval
from asyncrl.observability.timeline import EpisodeTimeline, GroupTimeline
from scripts import sizes

pytest.importorskip("asyncrl.extensions.slurm")  # the plans here are of its jobs

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
        GroupTimeline(f"g{group}", group, "t", "training", 0, 0.0, 1.0, "committed", episodes)
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
    writer, groups = files.writer(run, files.ROLLOUT), generated()
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


def test_metrics_tell_speeds_and_the_fit_names_the_rest(run: Path) -> None:
    metrics_alone(run, varied=True)
    found = fit(run)
    assert found.notes == [PROMPTS, UNKNOWN]
    assert found.fields["per_token"] == pytest.approx(SHAPE.per_token, rel=0.01)
    assert found.fields["per_request"] == pytest.approx(SHAPE.per_request, rel=0.01)
    assert (found.fields["mean"], found.fields["turns"]) == (300, 2)
    assert found.fields["train_fixed"] == pytest.approx(FIXED, rel=0.05)
    assert not {"sigma", "alike", "tool_seconds"} & found.fields.keys()


def test_constant_concurrency_hides_the_cost_of_a_batch(run: Path) -> None:
    steps = metrics_alone(run, varied=False)
    found = fit(run)
    assert CONSTANT in found.notes
    assert found.fields["per_request"] == 0
    assert found.fields["per_token"] == pytest.approx(SHAPE.per_token + 4 * EACH * SHAPE.per_request, rel=0.01)
    seconds = sum(step["time/step"] for step in steps[3:])
    assert f"and made {9 * 64 * 8 / seconds:.4g}" in in_words(found.compare(seeds=1))


def test_prompts_that_the_metrics_tell_are_the_plans(run: Path) -> None:
    steps = metrics_alone(run, varied=True)
    for number, step in enumerate(steps):
        step["prompt/length"] = 100.0 if number < 3 else 250.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    found = fit(run)
    assert found.fields["prompt"] == 250  # of the steps that count
    assert found.notes == [APART, UNKNOWN]


def test_too_short_a_run_is_refused(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(RecordError, match="has 0 steps"):
        fit(run)


# -- requests that were cut off ---------------------------------------------------------------------------------


def request(start: float, end: float, outcome: str = "", first: float | None = None) -> list[Interval]:
    """A request whose first token arrived at once, or that never got one."""
    if first is None and outcome == "overtaken":
        return [Interval(PREFILL, start, end, "policy", -1, outcome)]
    return [Interval(PREFILL, start, start), Interval(DECODE, start, end, "policy", 1, outcome)]


CUT = [*request(0, 2, "the stream ended"), Interval(RETRY, 2, 7, "the stream ended"), *request(7, 9)]
"""An answer whose engine died; five seconds later another continues it."""
OVERTAKEN = [*request(0, 1, "overtaken"), *request(1, 3)]
TWO_TURNS = [*CUT, Interval(TOOL, 9, 12), *request(12, 13)]
AGAIN = [*request(0, 2), Interval(TOOL, 2, 4), Interval(RETRY, 4, 5, "environment"), *request(5, 6)]
"""An episode whose environment failed, and that was played again."""


@pytest.mark.parametrize(
    ("intervals", "turns", "seconds"), [(CUT, 1, 0.0), (OVERTAKEN, 1, 0.0), (TWO_TURNS, 2, 3.0), (AGAIN, 1, 0.0)]
)
def test_turns_are_answered_requests_and_no_outage_a_tool(
    intervals: list[Interval], turns: int, seconds: float
) -> None:
    episode = EpisodeTimeline(0.0, 100, intervals)
    found = length_fields([GroupTimeline("g", 0, "t", "training", 0, 0.0, 1.0, "committed", [episode] * 2)])
    assert (found["turns"], found["tool_seconds"]) == (turns, seconds)
    assert outside(episode) == seconds


def test_continued_answers_count_tokens_behind_the_first() -> None:
    episodes = [EpisodeTimeline(0.0, 42, CUT)] * 4
    group = GroupTimeline("g", 0, "t", "training", 0, 0.0, 9.0, "committed", episodes)
    per_token, per_request = engine_times([group], 1)
    assert per_token + 4 * per_request == pytest.approx(4.0 / 40)  # 4 seconds of decoding


# -- runs that a plan cannot be made from, or that tell less ----------------------------------------------------


@pytest.mark.parametrize(
    ("section", "changes", "says"),
    [
        ("", {"mode": "replay"}, "mode=replay"),
        ("cluster", {"placement": "colocated"}, "cluster.placement=colocated"),
        ("cluster", {"placement": "shared"}, "cluster.placement=shared"),
        ("engine", {"urls": ["http://a:1"]}, "engine.urls="),
    ],
)
def test_run_of_another_kind_is_refused_by_name(section: str, changes: dict[str, Any], says: str) -> None:
    config = sizes.load("experiment=qwen3_8b")
    changed = changes if not section else {section: getattr(config, section).model_copy(update=changes)}
    refuse(Path("run"), config)
    with pytest.raises(RecordError, match=says):
        refuse(Path("run"), config.model_copy(update=changed))


def with_steps(run: Path, steps: list[dict[str, float]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))


def test_engines_are_those_that_served_and_a_change_is_noted(run: Path) -> None:
    steps = metrics_alone(run, varied=True)
    for number, step in enumerate(steps):
        step |= {"engines/serving": 1.0 if number < 6 else 3.0, "time/step": 10.0}
        step |= {"engines/serving": 4.0} if number == 11 else {}
    with_steps(run, steps)
    found = fit(run)
    assert found.engines == 2
    assert found.fields["gpus"] == 4 + 2
    assert any("Between 1 and 4 engines served: 2.08, the mean" in note for note in found.notes)
    with_steps(run, [step | {"engines/serving": 0.0} for step in steps])
    with pytest.raises(RecordError, match="No engine served"):
        fit(run)


def test_other_group_sizes_are_noted_and_averaged(run: Path) -> None:
    writer = files.writer(run, files.ROLLOUT)
    for number in range(8):
        episodes = [EpisodeTimeline(0.0, 100, request(0, 1))] * (2 if number % 2 else 6)
        writer.write(GroupTimeline(f"g{number}", number, "t", "training", 0, 0.0, 1.0, "committed", episodes))
    writer.close()
    found = fit(run)
    assert found.fields["group_size"] == 4
    assert SIZES in found.notes


@pytest.mark.parametrize("slope", [0.0, -1e-4, 1e-5])
def test_indistinct_steps_make_no_infinitely_fast_trainer(run: Path, slope: float) -> None:
    """The noise is far larger than what the tokens explain."""
    noise, steps = [0.5, -0.5, -0.5, 0.5], metrics_alone(run, varied=True)
    for number, step in enumerate(steps):
        step["tokens/trained"] = 60_000 + 100 * (number % 3)
        step["time/step"] = 20.0 + slope * step["tokens/trained"] + noise[number % 4] + 4 + PAUSE
    rate, fixed, known = trainer_times(steps, 60_000.0)
    assert (fixed, known) == (0.0, False)
    assert rate == pytest.approx(60_000 / (20 + slope * 60_000), rel=0.05)
    with_steps(run, steps)
    assert TRAINER in fit(run).notes


def test_earlier_run_has_defaults_of_what_came_later(run: Path) -> None:
    metrics_alone(run, varied=True)
    whole, values = fit(run).settings, json.loads((run / "config.json").read_text())
    of_extensions = [name for name in ("observe", "teacher.max_running") if name.partition(".")[0] in values]
    for name in ("weights.overlap", "trainer.batch_parts", "task.weight", *of_extensions):
        *path, last = name.split(".")
        section = values
        for part in path:
            section = section[part]
        del section[last]
    (run / "config.json").write_text(json.dumps(values))
    assert fit(run).settings == whole


def test_run_in_progress_is_read_to_its_last_whole_step(run: Path) -> None:
    steps = metrics_alone(run, varied=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"time/step": 1')
    assert len(fit(run).steps) == 9
    with_steps(run, [{name: value for name, value in step.items() if name != "time/pause"} for step in steps])
    with pytest.raises(RecordError, match=r"metrics.jsonl have no 'time/pause'"):
        fit(run)
    with pytest.raises(RecordError, match="is not the folder of a run"):
        fit(run / "elsewhere")
