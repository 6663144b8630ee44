"""Timelines of episodes and groups, made by hand."""

from __future__ import annotations

from asyncrl.extensions.timelines.files import EngineSpan, Record
from asyncrl.observability.intervals import Interval
from asyncrl.observability.timeline import BatchTimeline, EpisodeTimeline, GroupTimeline, ProcessSpan, PublishTimeline

DECODE, TOOL, ENVIRONMENT, WAITING = "decode", "tool", "environment", "waiting"


def episode(reward: float | None, *intervals: Interval) -> EpisodeTimeline:
    return EpisodeTimeline(reward, 3, list(intervals))


def group(uid: str, *episodes: EpisodeTimeline, ended: float = 10.0, **changes: object) -> GroupTimeline:
    values = {"purpose": "training", "outcome": "committed", "task": "sum"} | changes
    return GroupTimeline(uid, 0, born=0, admitted=0.0, ended=ended, episodes=list(episodes), **values)  # type: ignore[arg-type]


def recorded(slot: int, ended: float = 2.0) -> GroupTimeline:
    one = EpisodeTimeline(1.0, 7, [Interval(DECODE, 1.0, ended, version=3)])
    return GroupTimeline(f"g{slot}", slot, "copy", "training", 3, 0.5, ended, "committed", [one])


RECORDS: list[Record] = [
    recorded(0),
    recorded(1),
    BatchTimeline(0, 1.5, 2.0, ["g0", "g1"], "g1"),
    PublishTimeline(1, 3.0, 3.5),
    ProcessSpan("trainer 0", "forward", 2.0, 2.5, 0, {"micro_batches": 2.0}),
    EngineSpan("engine 0", "Req", "a" * 32, "b" * 16, "", 1.0, 2.0, {"rid": "x"}),
]
