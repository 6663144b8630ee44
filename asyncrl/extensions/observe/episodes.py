"""Metrics of episodes, computed from the timelines of groups and batches (observability/timeline.py)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from asyncrl.extensions.timelines.reader import durations
from asyncrl.observability.intervals import ENVIRONMENT, PHASES, TOOL, WAITING
from asyncrl.observability.timeline import BatchTimeline, EpisodeTimeline, GroupTimeline, Record

MOST_GROUPS = 100_000
"""Number of committed groups that are remembered until their batch. Only dropped groups are in none."""
DIFFICULTY = {"all": 1.0, "easy": 2 / 3, "medium": 1 / 3, "hard": 0.0}
"""Kinds of groups by the share of their episodes that is solved: all of them, at least this much, or "none"."""


@dataclass(frozen=True)
class _Finished:
    """A committed group."""

    ended: float
    task: str
    cause: str
    """What its slowest episode spent most time on: tool/NAME, or phase/PHASE."""


class EpisodeFigures:
    """Collects the timelines of training groups, and returns their metrics at every batch."""

    def __init__(self, correct: Mapping[str, Callable[[float], bool]]) -> None:
        """`correct` says for each task whether a reward is that of a correct answer."""
        self._correct = correct
        self._phases: dict[str, list[float]] = {}
        self._calls: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._failed: Counter[str] = Counter()
        self._solved: dict[str, list[float]] = defaultdict(list)
        self._finished: dict[str, _Finished] = {}
        self._straggler: dict[str, float] = {}
        self._taken = 0.0

    def __call__(self, record: Record) -> None:
        """Add a record; those of evaluations and publishes have no metrics here."""
        if isinstance(record, GroupTimeline) and record.purpose == "training":
            self._add(record)
        elif isinstance(record, BatchTimeline):
            self._straggler = self._wait(record)

    def take_figures(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        found: dict[str, float] = {}
        for phase, seconds in self._phases.items():
            found |= _spread(f"episode_time/{phase}", seconds)
            seconds.clear()
        for (phase, name), seconds in sorted(self._calls.items()):
            found |= _spread(f"{phase}_time/{name}", seconds)
            if phase == TOOL:
                found |= {f"tool_calls/{name}": len(seconds), f"tool_failures/{name}": self._failed[name]}
        groups = [share for shares in self._solved.values() for share in shares]
        found |= {f"pass_rate/{task}": fmean(shares) for task, shares in sorted(self._solved.items())}
        if groups:
            kinds = Counter(map(_difficulty, groups))
            found |= {f"difficulty/{kind}": kinds[kind] / len(groups) for kind in (*DIFFICULTY, "none")}
        self._calls.clear()
        self._failed.clear()
        self._solved.clear()
        return found | self._straggler

    def _add(self, group: GroupTimeline) -> None:
        spent = [durations(one) for one in group.episodes]
        for phase in PHASES:
            seconds = [one[phase] for one in spent]
            if phase in self._phases or any(seconds):
                self._phases.setdefault(phase, []).extend(seconds)
        for episode in group.episodes:
            for one in episode.intervals:
                if one.phase in (TOOL, ENVIRONMENT):
                    self._calls[one.phase, one.name].append(one.seconds)
                    self._failed[one.name] += bool(one.outcome) and one.phase == TOOL
        rewards = [one.reward for one in group.episodes if one.reward is not None]
        if rewards and group.task in self._correct:
            self._solved[group.task].append(fmean(list(map(self._correct[group.task], rewards))))
        if group.outcome == "committed":
            slowest = min(range(len(spent)), key=lambda place: spent[place][WAITING])
            self._finished[group.uid] = _Finished(
                group.ended, group.task, _cause(spent[slowest], group.episodes[slowest])
            )
            if len(self._finished) > MOST_GROUPS:
                del self._finished[next(iter(self._finished))]

    def _wait(self, batch: BatchTimeline) -> dict[str, float]:
        """Return how long a batch waited for its last group alone, and whose fault that was."""
        groups = {uid: self._finished.pop(uid, None) for uid in batch.uids}
        last = groups.pop(batch.last, None)
        others = max((one.ended for one in groups.values() if one), default=0.0)
        seconds = max(0.0, batch.taken - max(batch.asked, others)) if last else 0.0
        since, self._taken = batch.taken - (self._taken or batch.asked), batch.taken
        found = {"straggler/time": seconds, "straggler/share": seconds / since if since > 0 else 0.0}
        return found | ({f"straggler/task/{last.task}": seconds, f"straggler/{last.cause}": seconds} if last else {})


def _cause(spent: Mapping[str, float], episode: EpisodeTimeline) -> str:
    phase = max((phase for phase in PHASES if phase != WAITING), key=lambda phase: spent[phase])
    if phase != TOOL:
        return f"phase/{phase}"
    tools: Counter[str] = Counter()
    for one in episode.intervals:
        if one.phase == TOOL:
            tools[one.name] += one.seconds  # type: ignore[assignment]
    return f"tool/{tools.most_common(1)[0][0]}"


def _difficulty(solved: float) -> str:
    return next((kind for kind, least in DIFFICULTY.items() if solved >= least and solved > 0.0), "none")


def _spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, median and 99th percentile; none of nothing."""
    if not seconds:
        return {}
    ranked, last = sorted(seconds), len(seconds) - 1
    return {
        f"{name}/mean": fmean(ranked),
        f"{name}/p50": ranked[round(0.5 * last)],
        f"{name}/p99": ranked[math.ceil(0.99 * last)],
    }
