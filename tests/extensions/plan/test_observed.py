"""What the controller of an elastic run is told is what the files of the run say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from asyncrl import jsonl
from asyncrl.extensions.plan.observed import FEWEST, RunObserver, setting_of
from asyncrl.extensions.timelines import files
from asyncrl.observability.intervals import DECODE, PREFILL, TOOL, Interval
from asyncrl.observability.timeline import EpisodeTimeline, GroupTimeline
from tests.fakes import tiny_config

STEP = {
    "step": 3,
    "time/since_start": 50.0,
    "time/step": 4.0,
    "time/wait_batch": 1.0,
    "time/pause": 0.5,
    "prompt/length": 30.0,
    "completion/length": 20.0,
    "episodes/turns": 2.0,
    "samples/generated": 32,
    "engines/serving": 2,
    "admission/lead": 1,
}


def group(number: int, outcome: str = "committed", purpose: str = "training") -> GroupTimeline:
    """Four episodes of 41 tokens in two turns, in 4 seconds, with a tool that takes 2."""
    spans = [
        Interval(PREFILL, 0.0, 0.0),
        Interval(DECODE, 0.0, 2.0),
        Interval(TOOL, 2.0, 4.0),
        Interval(PREFILL, 4.0, 4.0),
        Interval(DECODE, 4.0, 6.0),
    ]
    episodes = [EpisodeTimeline(0.0, 42, spans)] * 4
    return GroupTimeline(f"g{number}", number, "t", purpose, 0, 0.0, 6.0, outcome, episodes)


@pytest.mark.parametrize("limit", [5, None, "auto"])
def test_setting_is_the_runs(limit: int | str | None) -> None:
    config = tiny_config(**{"rollout.max_staleness": 4, "rollout.lead": 2, "rollout.max_running_groups": limit})
    found = setting_of(config)
    assert (found.engines, found.max_staleness, found.lead) == (config.engine.count, 4, 2)
    assert found.in_play == {5: 5 * config.rollout.group_size, None: 0, "auto": None}[limit]
    assert found.shape.kv_tokens == (config.engine.max_total_tokens or math.inf)


def test_steps_groups_and_speeds_are_those_of_the_files(tmp_path: Path) -> None:
    config = tiny_config()
    jsonl.append(tmp_path / "metrics.jsonl", {**STEP, "step": 2})  # of an earlier start
    observer = RunObserver(tmp_path, config)
    assert list(observer.new()) == []
    writer = files.writer(tmp_path, files.ROLLOUT)
    for number in range(FEWEST):
        writer.write(group(number))
    writer.write(group(100, outcome="timeout"))
    writer.write(group(101, purpose="evaluation"))
    writer.close()
    jsonl.append(tmp_path / "metrics.jsonl", STEP)
    (seen,) = observer.new()
    assert (seen.step, seen.time, seen.seconds, seen.waited, seen.paused) == (3, 50.0, 4.0, 1.0, 0.5)
    assert (seen.engines, seen.lead, seen.turns, seen.prompt) == (2, 1, 2.0, 30.0)
    batch = config.rollout.batch_groups * 4  # of the groups, which a task's group_size may change
    assert seen.tokens == batch * 40.0
    assert seen.made == 32 / batch
    assert seen.groups == [[(42.0, 2.0)] * 4] * FEWEST
    assert seen.shape is not None
    running = 4 * FEWEST / 2  # in each of two engines
    assert seen.shape.per_token + seen.shape.per_request * running == pytest.approx(4.0 / 40)
    assert list(observer.new()) == []
