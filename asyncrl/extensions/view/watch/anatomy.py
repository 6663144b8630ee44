"""The anatomy of a batch: a row of intervals for each of its episodes, the lanes of the trainers, the load of the
engines, and the straggler that the batch waited for. Pure functions of timelines (asyncrl/observability/timeline.py).

Numbers travel as flat lists, in milliseconds since `start`, because a batch may have 10,000 episodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.extensions.timelines.files import Record
from asyncrl.extensions.timelines.reader import durations
from asyncrl.observability.intervals import DECODE, ENVIRONMENT, PHASES, PREFILL, TOOL, WAITING
from asyncrl.observability.timeline import BatchTimeline, EpisodeTimeline, GroupTimeline, ProcessSpan, PublishTimeline

LOAD_BINS = 400
"""Points of the engines' load over the time of a batch."""


@dataclass(frozen=True)
class Straggler:
    """The episode that a batch waited for, and what took most of its time."""

    uid: str
    episode: int
    task: str
    phase: str
    name: str
    """Of the tool, environment, reward or role."""
    seconds: float
    """That it spent in this phase."""
    total: float
    """Seconds from its admission to its end."""
    waited: float
    """Seconds that the trainer waited for the batch."""
    step: int = 0
    """Number of the batch."""


@dataclass(frozen=True)
class BatchFacts:
    """What advice needs to know of a batch."""

    episodes: int
    late: Straggler | None
    seconds: dict[tuple[str, str], float]
    """Of its episodes, by phase and name."""

    @classmethod
    def of(cls, batch: BatchTimeline, groups: Sequence[GroupTimeline]) -> BatchFacts:
        """Compute the facts."""
        episodes = [episode for group in groups for episode in group.episodes]
        return cls(len(episodes), straggler(batch, groups), phase_seconds(episodes))


def straggler(batch: BatchTimeline, groups: Sequence[GroupTimeline]) -> Straggler | None:
    """Return the episode that ended last, of the group that the batch waited for, and the phase in which it spent most
    of its time, as straggler/phase and straggler/tool of metrics.jsonl do; None without timelines."""
    group = next((group for group in groups if group.uid == batch.last), None)
    group = group or max(groups, key=lambda group: group.ended, default=None)
    if group is None or not any(map(_worked_until, group.episodes)):
        return None
    number, episode = max(enumerate(group.episodes), key=lambda one: _worked_until(one[1]))
    spent = durations(episode)
    phase = max((phase for phase in PHASES if phase != WAITING), key=lambda phase: spent[phase])
    named = {key: seconds for key, seconds in phase_seconds([episode]).items() if key[0] == phase}
    _, name = max(named, key=lambda key: named[key])
    total = _worked_until(episode) - group.admitted
    waited = batch.taken - batch.asked
    seconds = min(named[phase, name], total)  # calls of tools that overlap add up to more
    return Straggler(group.uid, number, group.task, phase, name, seconds, total, waited, batch.step)


def phase_seconds(episodes: Iterable[EpisodeTimeline]) -> dict[tuple[str, str], float]:
    """Return the seconds of episodes by phase and name. Time in tools is not counted as their environment's."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for episode in episodes:
        for one in episode.intervals:
            found[one.phase, one.name] += one.seconds
    tools, around = (sum(found[key] for key in found if key[0] == phase) for phase in (TOOL, ENVIRONMENT))
    own = max(0.0, 1 - tools / around) if around else 0.0
    return {key: seconds * (own if key[0] == ENVIRONMENT else 1) for key, seconds in found.items()}


def anatomy(
    batch: BatchTimeline,
    groups: Sequence[GroupTimeline],
    nearby: Iterable[Record],
    publishes: Mapping[int, PublishTimeline],
) -> dict[str, Any]:
    """Return what the page draws of a batch. `nearby` are all records that overlap its time."""
    start = min(map(begins, groups), default=batch.asked)
    spans, others = list[ProcessSpan](), dict[str, GroupTimeline]()
    for record in nearby:
        if isinstance(record, ProcessSpan):
            spans.append(record)
        elif isinstance(record, GroupTimeline):
            others[record.uid] = record
    trained = [span.end for span in spans if span.step == batch.step and span.name != "wait_batch"]
    end = max([batch.taken, *(group.ended for group in groups), *trained])
    late = straggler(batch, groups)
    return {
        "step": batch.step,
        "start": start,
        "end": _ms(end, start),
        "asked": _ms(batch.asked, start),
        "taken": _ms(batch.taken, start),
        "missing": len(batch.uids) - len(groups),
        "phases": PHASES,
        "straggler": late and {"text": told(late), **late.__dict__},
        **_rows(groups, start),
        "lanes": _lanes(spans, start),
        "publishes": [
            [one.version, _ms(one.held, start), _ms(one.released, start)]
            for one in publishes.values()
            if one.held < end and one.released > start
        ],
        "load": load({**others, **{group.uid: group for group in groups}}.values(), start, end),
    }


def begins(group: GroupTimeline) -> float:
    """Return when a group was admitted; its episodes may have begun some milliseconds before that was noted."""
    return min([group.admitted, *(one.start for episode in group.episodes for one in episode.intervals[:1])])


def told(late: Straggler) -> str:
    """Return a straggler in words."""
    what = f"{late.phase} {late.name}".strip()
    return (
        f"{late.uid}, episode {late.episode} ({late.task}): {late.seconds:.1f} of {late.total:.1f} s in {what}; "
        f"the trainer waited {late.waited:.1f} s for the batch"
    )


def load(groups: Iterable[GroupTimeline], start: float, end: float, bins: int = LOAD_BINS) -> list[list[float]]:
    """Return the mean number of requests in prefill and in decode during each bin."""
    width = max(end - start, 1e-9) / bins
    found = {PREFILL: [0.0] * bins, DECODE: [0.0] * bins}
    for group in groups:
        for episode in group.episodes:
            for one in episode.intervals:
                if one.phase in found:
                    _add(found[one.phase], (one.start - start) / width, (one.end - start) / width)
    return [[round(value, 2) for value in found[phase]] for phase in (PREFILL, DECODE)]


def _add(bins: list[float], first: float, last: float) -> None:
    """Add the share of each bin that [first, last) covers."""
    first, last = max(0.0, first), min(float(len(bins)), last)
    place = int(first)
    while place < last:
        bins[place] += min(last, place + 1) - max(first, place)
        place += 1


def _rows(groups: Sequence[GroupTimeline], start: float) -> dict[str, Any]:
    """Return episodes and intervals as flat lists: `first` is where the intervals of each episode begin."""
    names: dict[str, int] = {}
    first, intervals, episodes = list[int](), list[int](), list[list[Any]]()
    for number, group in enumerate(groups):
        for sibling, episode in enumerate(group.episodes):
            first.append(len(intervals) // 5)
            episodes.append([number, sibling, episode.reward, episode.tokens])
            for one in sorted(episode.intervals, key=lambda one: (one.start, -one.end)):  # tools after what calls them
                intervals += (PHASES.index(one.phase), _ms(one.start, start), _ms(one.end, start), one.version)
                intervals.append(
                    names.setdefault(f"{one.name}: {one.outcome}" if one.outcome else one.name, len(names))
                )
    return {
        "groups": [[one.uid, one.task, _ms(one.admitted, start), _ms(one.ended, start), one.born] for one in groups],
        "episodes": episodes,
        "first": first,
        "intervals": intervals,
        "names": list(names),
    }


def _lanes(spans: Iterable[ProcessSpan], start: float) -> list[dict[str, Any]]:
    lanes: dict[str, list[list[Any]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        lanes[span.process].append([span.name, _ms(span.start, start), _ms(span.end, start), span.step])
    return [{"name": name, "spans": lanes[name]} for name in sorted(lanes)]


def _worked_until(episode: EpisodeTimeline) -> float:
    return max((one.end for one in episode.intervals if one.phase != WAITING), default=0.0)


def _ms(moment: float, start: float) -> int:
    return round(1000 * (moment - start))
