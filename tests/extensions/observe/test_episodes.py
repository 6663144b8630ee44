"""Metrics of episodes follow from their timelines."""

from __future__ import annotations

import pytest

from asyncrl.extensions.observe.episodes import EpisodeFigures
from asyncrl.metrics.fields import unknown
from asyncrl.observability.intervals import Interval
from asyncrl.observability.timeline import BatchTimeline
from tests.extensions.timelines.made import DECODE, ENVIRONMENT, TOOL, WAITING, episode, group


def figures() -> EpisodeFigures:
    return EpisodeFigures({"sum": lambda reward: reward > 0.5})


def test_time_of_an_episode_is_split_into_phases_and_calls() -> None:
    found = figures()
    quick = episode(1.0, Interval(DECODE, 0.0, 2.0), Interval(WAITING, 2.0, 10.0))
    slow = episode(
        0.0,
        Interval(DECODE, 0.0, 1.0),
        Interval(ENVIRONMENT, 1.0, 9.0, "shell"),
        Interval(TOOL, 2.0, 8.0, "search", outcome="no network"),
        Interval(DECODE, 9.0, 10.0),
    )
    found(group("a", quick, slow))
    found(group("e", quick, purpose="evaluation"))  # evaluations do not count
    taken = found.take_figures()
    assert unknown(taken) == []
    assert {f"{of}": taken[f"episode_time/decode/{of}"] for of in ("mean", "p50", "p99")} == pytest.approx(
        {"mean": 2.0, "p50": 2.0, "p99": 2.0}
    )
    assert (taken["episode_time/tool/mean"], taken["episode_time/tool/p99"]) == (3.0, 6.0)
    assert taken["episode_time/environment/p99"] == 2.0  # without the tool in it
    assert taken["environment_time/shell/mean"] == 8.0
    assert (taken["tool_time/search/p50"], taken["tool_calls/search"], taken["tool_failures/search"]) == (6.0, 1, 1)
    assert "episode_time/teacher/mean" not in taken
    assert found.take_figures() == {}  # nothing has ended since


def test_pass_rate_and_difficulty_count_whole_episodes() -> None:
    found = figures()
    for uid, rewards in {"a": [1, 1], "b": [0, 1, 1], "c": [0, 1], "d": [0, 0, 0, 1], "e": [0, 0]}.items():
        found(group(uid, *(episode(float(reward)) for reward in rewards)))
    found(group("f", episode(None), outcome="engine"))
    taken = found.take_figures()
    assert taken["pass_rate/sum"] == pytest.approx((1 + 2 / 3 + 0.5 + 0.25) / 5)
    assert {kind: taken[f"difficulty/{kind}"] for kind in ("all", "easy", "medium", "hard", "none")} == {
        "all": 0.2,
        "easy": 0.2,
        "medium": 0.2,
        "hard": 0.2,
        "none": 0.2,
    }


def test_straggler_is_charged_with_the_wait_it_caused() -> None:
    found = figures()
    slow = episode(0.0, Interval(DECODE, 0.0, 1.0), Interval(TOOL, 1.0, 20.0, "search"))
    waiting = episode(0.0, Interval(DECODE, 0.0, 1.0), Interval(WAITING, 1.0, 20.0))
    found(group("a", episode(0.0, Interval(DECODE, 0.0, 8.0)), ended=8.0))
    found(group("b", waiting, slow, ended=20.0))
    found(BatchTimeline(1, asked=5.0, taken=20.0, uids=["a", "b"], last="b"))
    taken = found.take_figures()
    assert unknown(taken) == []
    straggler = {name: value for name, value in taken.items() if name.startswith("straggler")}
    assert straggler == {
        "straggler/time": 12.0,
        "straggler/share": 0.8,
        "straggler/task/sum": 12.0,
        "straggler/tool/search": 12.0,
    }
    found(group("c", episode(0.0, Interval(DECODE, 20.0, 29.0)), ended=29.0))
    found(BatchTimeline(2, asked=30.0, taken=30.0, uids=["c"], last=""))  # it was ready
    taken = found.take_figures()
    assert {name: value for name, value in taken.items() if name.startswith("straggler")} == {
        "straggler/time": 0.0,
        "straggler/share": 0.0,
    }
