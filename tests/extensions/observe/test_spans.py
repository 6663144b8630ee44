"""The spans of a prompt form one tree, in which the header of each request names the span of that request."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.extensions.observe import perfetto
from asyncrl.extensions.observe.spans import Span, TraceBuilder, run_prefix, trace_id, traceparent
from asyncrl.extensions.timelines import files
from asyncrl.extensions.timelines.files import EngineSpan, Started
from asyncrl.observability.intervals import DECODE, ENGINE, PREFILL, QUEUED, RETRY, TOOL, Activity, Interval, request
from asyncrl.observability.timeline import BatchTimeline, EpisodeTimeline, GroupTimeline, ProcessSpan, PublishTimeline

RUN = "run0"


def group(*episodes: list[Interval], uid: str = "g0", outcome: str = "committed") -> GroupTimeline:
    played = [EpisodeTimeline(0.5, 7, intervals) for intervals in episodes]
    return GroupTimeline(uid, 0, "copy", "training", 3, 1.0, 20.0, outcome, played)


def spans(*records: files.Record) -> list[Span]:
    build = TraceBuilder(RUN)
    return [span for record in records for span in build.spans(record)]


def test_header_names_its_span_when_requests_overlap() -> None:
    intervals = [
        Interval(PREFILL, 1.0, 2.0),
        Interval(QUEUED, 1.5, 1.6, ENGINE),
        Interval(PREFILL, 1.6, 2.5),
        Interval(DECODE, 2.0, 3.0, version=3),
        Interval(DECODE, 2.5, 4.0, version=3, outcome="reset"),
        Interval(DECODE, 3.0, 5.0, version=4),
        Interval(RETRY, 4.0, 4.2, "reset"),
        Interval(TOOL, 5.0, 6.0, "search"),
        Interval(PREFILL, 6.0, 6.5),
        Interval(DECODE, 6.5, 8.0, version=4),
    ]
    found = spans(group([], intervals))
    expected = {1: (1.0, 5.0), 2: (1.5, 4.0), 3: (6.0, 8.0)}
    for number, (start, end) in expected.items():
        version, trace, parent, flags = traceparent(RUN, "g0", "1", number, sampled=number != 2).split("-")
        (of_request,) = [one for one in found if one.span == parent]
        assert (version, trace, flags) == ("00", trace_id(RUN, "g0"), "00" if number == 2 else "01")
        assert (of_request.name, of_request.start, of_request.end) == ("request", start, end)
    assert [one.error for one in found if one.error] == ["reset"]


def test_requests_that_were_counted_are_those_that_are_found() -> None:
    activity = Activity()
    for number in range(3):
        one = activity.begin(PREFILL, "")
        activity.requests += 1
        activity.heard(one)
        activity.close(one, request(one, one.first + number, [(3, 1), (4, 1)], queued=0.001 * number))
    found = spans(group(activity.intervals(one.first + 5)))
    numbers = [traceparent(RUN, "g0", "0", number, sampled=True).split("-")[2] for number in (1, 2, 3)]
    assert [one.span for one in found if one.name == "request"] == numbers


def test_a_group_is_one_tree_from_its_admission_to_its_publish() -> None:
    tool = [Interval(TOOL, 2.0, 3.0, "search", outcome="tool: down")]
    found = spans(
        group(tool, tool),
        group(tool, uid="g1", outcome="judge"),
        BatchTimeline(4, 15.0, 21.0, ["g0"], "g0"),
        PublishTimeline(5, 30.0, 31.0),
        ProcessSpan("trainer 1", "forward", 22.0, 23.0, 4),
        EngineSpan("engine-0", "Req", "c" * 32, "d" * 16, "e" * 16, 2.0, 3.0, {"rid": "r"}),
    )
    mine = [one for one in found if one.trace == trace_id(RUN, "g0")]
    assert len({one.span for one in found}) == len(found)
    roots = [one for one in mine if not one.parent]
    assert {one.parent for one in mine} - {""} <= {one.span for one in mine}
    assert [one.name for one in roots] == ["group g0"]
    after = [(one.name, one.start, one.end) for one in mine if one.parent == roots[0].span and one.start >= 20.0]
    assert after == [("wait for its batch", 20.0, 21.0), ("training", 21.0, 30.0), ("publish", 30.0, 31.0)]
    assert {one.service for one in found} == {"rollout", "trainer 1", "engine-0"}
    assert [one.error for one in found if one.name.startswith("group")] == ["", "judge"]
    assert all(one.trace.startswith(run_prefix(RUN)) for one in found if one.service != "engine-0")


EVENT = {
    "type": "object",
    "required": ["name", "ph", "pid", "tid", "args"],
    "properties": {
        "name": {"type": "string"},
        "ph": {"enum": ["X", "M"]},
        "ts": {"type": "integer", "minimum": 0},
        "dur": {"type": "integer", "minimum": 0},
        "pid": {"type": "integer", "minimum": 1},
        "tid": {"type": "integer", "minimum": 0},
        "args": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    },
    "if": {"properties": {"ph": {"const": "X"}}},
    "then": {"required": ["ts", "dur", "cat"]},
}
SCHEMA = {"type": "object", "required": ["traceEvents"], "properties": {"traceEvents": {"items": EVENT}}}
"""Of the part of Chrome's Trace Event Format that is written."""


def events(file: Path) -> list[dict]:
    content = json.loads(file.read_text())
    jsonschema.validate(content, SCHEMA)
    return content["traceEvents"]


@given(spans_=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 9), st.integers(0, 9))))
def test_events_of_a_track_nest_whatever_overlaps(
    spans_: list[tuple[str, str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    given_ = [Span(service, track, "s", "t", "p", "", float(a), float(a + b)) for service, track, a, b in spans_]
    assert perfetto.write(file, given_) == len(given_)
    found = events(file)
    assert sum(event["ph"] == "X" for event in found) == len(given_)
    of_track = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            of_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for placed in of_track.values():
        for number, (start, end) in enumerate(placed):
            assert all(end <= s or start >= e or (s <= start and end <= e) for s, e in placed[:number])
    names = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert names == sorted({one.service for one in given_})
    assert len({event["tid"] for event in found if event["name"] == "thread_name"}) == len(of_track)


def test_command_writes_what_every_process_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = pytest.importorskip("asyncrl.extensions.view.inspection.cli")
    rollout, trainer = files.writer(tmp_path, "rollout"), files.writer(tmp_path, "trainer 0")
    rollout.write(Started(RUN, 0.0))
    rollout.write(group([Interval(TOOL, 2.0, 3.0, "search")]))
    trainer.write(ProcessSpan("trainer 0", "forward", 22.0, 23.0, 4))
    for writer in (rollout, trainer):
        writer.close()
    assert cli.main([str(tmp_path), "--trace", str(tmp_path / "trace.json")]) == 0
    assert "4 spans" in capsys.readouterr().out
    found = events(tmp_path / "trace.json")
    assert [one["args"]["name"] for one in found if one["name"] == "process_name"] == ["rollout", "trainer 0"]
    assert {one["args"]["trace"] for one in found if one["ph"] == "X"} == {
        trace_id(RUN, "g0"),
        trace_id(RUN, "batch 4"),
    }
    assert cli.main([str(tmp_path / "none"), "--trace", str(tmp_path / "trace.json")]) == 1
    assert "timelines.record=true" in capsys.readouterr().err
