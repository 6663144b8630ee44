"""Timelines of episodes and groups, made by hand."""

from __future__ import annotations

from asyncrl.observability.intervals import Interval
from asyncrl.observability.timeline import EpisodeTimeline, GroupTimeline

DECODE, TOOL, ENVIRONMENT, WAITING = "decode", "tool", "environment", "waiting"


def episode(reward: float | None, *intervals: Interval) -> EpisodeTimeline:
    return EpisodeTimeline(reward, 3, list(intervals))


def group(uid: str, *episodes: EpisodeTimeline, ended: float = 10.0, **changes: object) -> GroupTimeline:
    values = {"purpose": "training", "outcome": "committed", "task": "sum"} | changes
    return GroupTimeline(uid, 0, born=0, admitted=0.0, ended=ended, episodes=list(episodes), **values)  # type: ignore[arg-type]
