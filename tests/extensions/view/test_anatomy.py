"""The anatomy of a batch names what the batch waited for, and counts time exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.extensions.recording import frames
from asyncrl.extensions.timelines import files
from asyncrl.extensions.timelines.files import Record
from asyncrl.extensions.view.watch.anatomy import anatomy, load, phase_seconds, straggler
from asyncrl.extensions.view.watch.timelines import TimelineIndex
from asyncrl.observability.intervals import DECODE, ENVIRONMENT, PHASES, PREFILL, REWARD, TOOL, WAITING, Interval
from asyncrl.observability.timeline import (
    ROLLOUT,
    BatchTimeline,
    EpisodeTimeline,
    GroupTimeline,
    ProcessSpan,
    PublishTimeline,
)


def group(uid: str, *episodes: list[Interval], admitted: float = 0.0, ended: float = 9.0) -> GroupTimeline:
    played = [EpisodeTimeline(1.0, 3, intervals) for intervals in episodes]
    return GroupTimeline(uid, 0, "sum", "training", 0, admitted, ended, "committed", played)


FAST = group("fast", [Interval(DECODE, 1.0, 2.0, version=0), Interval(WAITING, 2.0, 8.0)], ended=2.0)
SLOW = group(
    "slow",
    [Interval(DECODE, 1.0, 3.0, version=0), Interval(TOOL, 3.0, 3.5, "calculator"), Interval(WAITING, 3.5, 8.0)],
    [
        *(Interval(PREFILL, 0.5, 1.0), Interval(DECODE, 1.0, 2.0, version=0), Interval(TOOL, 2.0, 4.0, "search")),
        *(Interval(DECODE, 4.0, 5.5, version=1), Interval(TOOL, 5.5, 7.0, "search")),
        *(Interval(REWARD, 7.0, 8.0), Interval(WAITING, 8.0, 20.0)),
    ],
    ended=8.0,
)


def test_straggler_is_the_last_episode_with_its_cause() -> None:
    late = straggler(BatchTimeline(0, 5.0, 8.5, ["fast", "slow"], "slow"), [FAST, SLOW])
    assert late
    assert (late.uid, late.episode, late.phase, late.name, late.seconds) == ("slow", 1, TOOL, "search", 3.5)
    assert (late.total, late.waited) == (8.0, 3.5)


def test_batch_that_did_not_wait_has_the_group_that_ended_last() -> None:
    late = straggler(BatchTimeline(0, 9.0, 9.0, ["fast", "slow"]), [FAST, SLOW])
    assert late
    assert (late.uid, late.waited) == ("slow", 0.0)
    assert straggler(BatchTimeline(0, 9.0, 9.0, ["lost"]), []) is None


def test_overlapping_calls_take_no_longer_than_the_episode() -> None:
    both = [Interval(TOOL, 0.0, 6.0, "search"), Interval(TOOL, 1.0, 7.0, "search")]
    late = straggler(BatchTimeline(4, 5.0, 7.5, ["g"], "g"), [group("g", both, ended=7.0)])
    assert late
    assert (late.seconds, late.total, late.step) == (7.0, 7.0, 4)


def test_time_in_tools_is_not_the_environments() -> None:
    """The metrics of a step count it so, too."""
    played = EpisodeTimeline(1.0, 3, [Interval(TOOL, 2.0, 5.0, "search"), Interval(ENVIRONMENT, 1.0, 5.0, "shop")])
    assert phase_seconds([played, played]) == {(TOOL, "search"): 6.0, (ENVIRONMENT, "shop"): 2.0}
    own = GroupTimeline("g", 0, "sum", "training", 0, 0.0, 5.0, "committed", [played])
    batch = BatchTimeline(0, 5.0, 5.5, ["g"], "g")
    late = straggler(batch, [own])
    assert late
    assert (late.phase, late.name, late.seconds) == (TOOL, "search", 3.0)
    found = anatomy(batch, [own], [], {})
    assert [PHASES[phase] for phase in found["intervals"][::5]] == [ENVIRONMENT, TOOL]


def test_load_is_the_mean_number_of_requests_in_each_bin() -> None:
    prefill, decode = load([FAST, SLOW], 0.0, 8.0, bins=4)
    assert prefill == [0.25, 0, 0, 0]
    assert decode == [1.5, 0.5, 0.75, 0]  # three decode from 1 to 2 s, one to 3 s, and one from 4 to 5.5 s


def test_anatomy_keeps_every_interval_and_the_lanes_of_its_time() -> None:
    batch = BatchTimeline(2, 5.0, 8.5, ["fast", "slow", "unsampled"], "slow")
    nearby: list[Record] = [ProcessSpan("trainer 0", "forward", 8.5, 9.5, 2), SLOW]
    found = anatomy(batch, [FAST, SLOW], nearby, {3: PublishTimeline(3, 6.0, 6.5), 9: PublishTimeline(9, 60.0, 61.0)})
    assert (found["start"], found["end"], found["asked"], found["taken"]) == (0.0, 9500, 5000, 8500)
    assert (found["missing"], found["publishes"]) == (1, [[3, 6000, 6500]])
    assert found["lanes"] == [{"name": "trainer 0", "spans": [["forward", 8500, 9500, 2]]}]
    assert [episode[:2] for episode in found["episodes"]] == [[0, 0], [1, 0], [1, 1]]
    assert found["first"] == [0, 2, 5]
    last = found["intervals"][5 * 5 : 5 * 9]
    assert last[:10] == [PHASES.index(PREFILL), 500, 1000, -1, 0, PHASES.index(DECODE), 1000, 2000, 0, 0]
    assert found["names"][last[14]] == "search"


def test_index_finds_groups_in_all_files_and_follows_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FILE_BYTES", 300)  # a file has one or two frames
    index, writer = TimelineIndex(tmp_path), files.writer(tmp_path, ROLLOUT)
    index.refresh()
    assert index.batches == {}
    for step in range(6):
        begins, ends = 10.0 * step, 10.0 * step + 5
        own = group(f"g{step}", [Interval(DECODE, begins, ends, version=step)], admitted=begins, ended=ends)
        for record in (own, BatchTimeline(step, begins, ends, [f"g{step}"])):
            writer.write(record)
        writer.flush()
        index.refresh()
        assert index.groups(index.batches[step]) == [own]
        assert [one for one in index.between(begins + 1, begins + 2) if isinstance(one, GroupTimeline)] == [own]
    writer.close()
    assert len(frames.files(files.folder_of(tmp_path, ROLLOUT))) > 2
    again = TimelineIndex(tmp_path)
    again.refresh()
    assert [one.uid for batch in again.batches.values() for one in again.groups(batch)] == [f"g{n}" for n in range(6)]


def test_retaken_batches_replace_the_rolled_back(tmp_path: Path) -> None:
    writer = files.writer(tmp_path, ROLLOUT)
    for step in (0, 1, 2, 1):
        writer.write(BatchTimeline(step, 0.0, 1.0, [f"g{step}"]))
    writer.close()
    launcher = files.writer(tmp_path, files.LAUNCHER)
    launcher.write(ProcessSpan("launcher", "restart", 1.0, 2.0, attributes={"process": "engine 0"}))
    launcher.close()
    index = TimelineIndex(tmp_path)
    index.refresh()
    assert list(index.batches) == [0, 1]
    assert [one.attributes["process"] for one in index.restarts] == ["engine 0"]
