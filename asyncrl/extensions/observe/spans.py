"""Traces: spans in OpenTelemetry's sense, derived from timelines. Nothing is recorded twice.

    trace of a prompt    group -> episodes -> requests (queued, prefill, decode by version), tools, environments,
                         rewards; then the wait for its batch, its training and its publish. The spans of router and
                         engines are children of the requests
    trace of a batch     the trainers' phases

Ids are hashes: a trace's of the run and the uid (which names the attempt), a span's of its place in the trace.
`traceparent` is therefore known when a request is sent, and the spans are built afterwards by whoever reads the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec

from asyncrl.extensions.timelines.files import EngineSpan, Record, Started, in_sample
from asyncrl.observability.intervals import DECODE, ENGINE, PREFILL, QUEUED, Interval
from asyncrl.observability.timeline import BatchTimeline, EpisodeTimeline, GroupTimeline, ProcessSpan, PublishTimeline

Attributes = dict[str, str | float]
MOST_WAITING = 100_000
"""Number of groups whose batch is awaited at most: those that none takes are forgotten in their order."""


class Span(msgspec.Struct, frozen=True):
    """A span. Ids are hexadecimal; `track` names its row among those of the same service."""

    service: str
    track: str
    name: str
    trace: str
    span: str
    parent: str
    start: float
    end: float
    attributes: Attributes = {}
    error: str = ""


@lru_cache(1)
def run_prefix(run: str) -> str:
    """Return the beginning of the ids of all traces of a run."""
    return hashlib.blake2b(run.encode(), digest_size=4).hexdigest()


def trace_id(run: str, name: str) -> str:
    """Return the id of the trace of a group (by its uid) or of a batch of a run (by its run_id)."""
    return run_prefix(run) + hashlib.blake2b(f"{run} {name}".encode(), digest_size=12).hexdigest()


def span_id(trace: str, place: str) -> str:
    """Return the id of the span at a place of a trace."""
    return hashlib.blake2b(f"{trace} {place}".encode(), digest_size=8).hexdigest()


def traceparent(run: str, uid: str, episode: str, request: int, *, sampled: bool) -> str:
    """Return the header of a request: the number-th of an episode."""
    trace = trace_id(run, uid)
    return f"00-{trace}-{span_id(trace, f'{episode}.{request}')}-{'01' if sampled else '00'}"


def trace_headers(run: str, share: float, uid: str, sample: str, request: int) -> Mapping[str, str]:
    """Return the header `traceparent` of the request-th request of a sample. `share` of the groups are traced."""
    return {"traceparent": traceparent(run, uid, sample.rpartition(" ")[2], request, sampled=in_sample(uid, share))}


class TraceBuilder:
    """Builds the spans of records, which must come in order for each process."""

    def __init__(self, run: str = "") -> None:
        """`run` is the run_id until a record says otherwise."""
        self._run = run
        self._ready: dict[str, float] = {}  # groups that wait for a batch, since when
        self._trained: dict[int, tuple[float, list[str]]] = {}  # batches that are not published: when they were taken

    def spans(self, record: Record) -> Iterator[Span]:
        """Yield the spans that a record completes."""
        if isinstance(record, Started):
            self._run = record.run_id
        elif isinstance(record, GroupTimeline):
            yield from self._group(record)
        elif isinstance(record, BatchTimeline):
            yield from self._batch(record)
        elif isinstance(record, PublishTimeline):
            yield from self._publish(record)
        elif isinstance(record, ProcessSpan):
            yield self._phase(record)
        elif isinstance(record, EngineSpan):
            track, told = f"trace {record.trace[:8]}", record.attributes
            place = record.trace, record.span, record.parent, record.start, record.end
            yield Span(record.service, track, record.name, *place, told)

    def _group(self, group: GroupTimeline) -> Iterator[Span]:
        trace, number = trace_id(self._run, group.uid), len(group.episodes)
        told: Attributes = {"task": group.task, "purpose": group.purpose, "born": group.born, "outcome": group.outcome}
        told["episodes"] = number
        name, error = f"group {group.uid}", "" if group.outcome == "committed" else group.outcome
        root = span_id(trace, "")
        yield Span("rollout", group.uid, name, trace, root, "", group.admitted, group.ended, told, error)
        for place, episode in enumerate(group.episodes):
            yield from _episode(trace, group, str(place), episode)
        if not error and group.purpose == "training":
            self._ready[group.uid] = group.ended
            if len(self._ready) > MOST_WAITING:
                del self._ready[next(iter(self._ready))]

    def _batch(self, batch: BatchTimeline) -> Iterator[Span]:
        trace = trace_id(self._run, f"batch {batch.step}")
        told: Attributes = {"last": batch.last, "groups": len(batch.uids)}
        name = f"wait for batch {batch.step}"
        yield Span("rollout", "batches", name, trace, span_id(trace, ""), "", batch.asked, batch.taken, told)
        for uid in batch.uids:
            if (ended := self._ready.pop(uid, None)) is not None:
                yield self._of_group(uid, "wait for its batch", ended, batch.taken, batch.step)
        self._trained[batch.step] = batch.taken, batch.uids

    def _publish(self, publish: PublishTimeline) -> Iterator[Span]:
        trace, version = trace_id(self._run, f"batch {publish.version - 1}"), publish.version
        name = f"publish {version}"
        yield Span("rollout", "publishes", name, trace, span_id(trace, name), "", publish.held, publish.released)
        taken, uids = self._trained.pop(version - 1, (0.0, []))
        for uid in uids:
            yield self._of_group(uid, "training", taken, publish.held, version - 1)
            yield self._of_group(uid, "publish", publish.held, publish.released, version - 1)

    def _of_group(self, uid: str, name: str, start: float, end: float, step: int) -> Span:
        trace = trace_id(self._run, uid)
        place, parent = span_id(trace, name), span_id(trace, "")
        return Span("rollout", uid, name, trace, place, parent, start, end, {"batch": step})

    def _phase(self, one: ProcessSpan) -> Span:
        trace = trace_id(self._run, f"batch {one.step}")
        place = span_id(trace, f"{one.process} {one.name} {one.start!r}")
        attributes = {**one.attributes, **({"batch": one.step} if one.step >= 0 else {})}
        return Span(one.process, "phases", one.name, trace, place, "", one.start, one.end, attributes)


def _episode(trace: str, group: GroupTimeline, place: str, episode: EpisodeTimeline) -> Iterator[Span]:
    """Yield the spans of an episode: those of a request are children of the one that its `traceparent` names."""
    track, own, intervals = f"{group.uid} {place}", span_id(trace, place), episode.intervals
    start, end = (intervals[0].start, max(one.end for one in intervals)) if intervals else (group.ended, group.ended)
    told: Attributes = {"tokens": episode.tokens, **({} if episode.reward is None else {"reward": episode.reward})}
    yield Span("rollout", track, f"episode {place}", trace, own, span_id(trace, ""), start, end, told)
    requests: list[tuple[int, float]] = []  # first interval of each request, and its end
    parents: dict[int, int] = {}  # number of the request of an interval
    open_until: dict[float, int] = {}
    for number, one in enumerate(intervals):
        if one.phase not in (PREFILL, DECODE) and (one.phase, one.name) != (QUEUED, ENGINE):
            continue
        request = open_until.pop(one.start, None) if one.phase != QUEUED else None
        if request is None:
            request = len(requests)
            requests.append((number, one.end))
        requests[request] = requests[request][0], one.end
        open_until[one.end] = parents[number] = request
    ids = [span_id(trace, f"{place}.{number + 1}") for number in range(len(requests))]
    for place_of, (first, ended) in zip(ids, requests, strict=True):
        yield Span("rollout", track, "request", trace, place_of, own, intervals[first].start, ended)
    for number, one in enumerate(intervals):
        parent = ids[parents[number]] if number in parents else own
        yield _interval(trace, track, f"{place}/{number}", parent, one)


def _interval(trace: str, track: str, place: str, parent: str, one: Interval) -> Span:
    attributes: Attributes = {**({"version": one.version} if one.version >= 0 else {})}
    name = f"{one.phase} {one.name}".rstrip()
    return Span(
        "rollout", track, name, trace, span_id(trace, place), parent, one.start, one.end, attributes, one.outcome
    )
