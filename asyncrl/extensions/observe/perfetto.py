"""Traces as Chrome's JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing show: a row for each process, a track
for each episode. Events of one track must nest; where spans overlap otherwise, the track has several lanes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from asyncrl.extensions.observe.spans import Span


def write(file: Path, spans: Iterable[Span]) -> int:
    """Write the spans to a file, one event a line, and return their number."""
    found = sorted(spans, key=lambda span: (span.service, span.track, span.start, -span.end))
    lines, thread = [], 0
    for process, (service, of_process) in enumerate(groupby(found, lambda span: span.service), 1):
        lines.append(_named("process_name", process, 0, service))
        for track, of_track in groupby(of_process, lambda span: span.track):
            lanes: list[list[int]] = []  # ends of the spans that are open in each lane
            for span in of_track:
                known = len(lanes)
                lane = _lane(lanes, *_microseconds(span))
                if lane == known:
                    name = f"{track} ({lane + 1})" if lane else track
                    lines.append(_named("thread_name", process, thread + lane, name))
                lines.append(_event(span, process, thread + lane))
            thread += len(lanes)
    events = ",\n".join(map(json.dumps, lines))
    file.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{events}\n]}}\n')
    return len(found)


def _lane(lanes: list[list[int]], start: int, end: int) -> int:
    """Return the number of the first lane in which a span nests, and open it there."""
    for number, lane in enumerate(lanes):
        while lane and lane[-1] <= start:
            lane.pop()
        if not lane or end <= lane[-1]:
            lane.append(end)
            return number
    lanes.append([end])
    return len(lanes) - 1


def _microseconds(span: Span) -> tuple[int, int]:
    return int(span.start * 1e6), max(int(span.start * 1e6), int(span.end * 1e6))


def _event(span: Span, process: int, track: int) -> dict[str, object]:
    start, end = _microseconds(span)
    ids = {"trace": span.trace, "span": span.span, "parent": span.parent}
    error = {"error": span.error} if span.error else {}
    return {
        "name": span.name,
        "cat": "failed" if span.error else "span",
        "ph": "X",
        "ts": start,
        "dur": end - start,
        "pid": process,
        "tid": track,
        "args": {**span.attributes, **error, **ids},
    }


def _named(kind: str, process: int, track: int, name: str) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}}
