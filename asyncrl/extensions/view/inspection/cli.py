"""`asyncrl-inspect`: show a recorded run in the terminal or write it as an HTML page.

    asyncrl-inspect RUN                                one line per batch
    asyncrl-inspect RUN --step 12                      the groups of batch 12
    asyncrl-inspect RUN --reward 0.5: --length :100    groups with a trajectory within these bounds
    asyncrl-inspect RUN --reason no_signal             groups that were rejected for this reason
    asyncrl-inspect RUN --uid g00000012 --text         the text of a group, with its turns and weight versions
    asyncrl-inspect RUN --uid g00000012 --text --gap   the same, coloured by the gap between trainer and engine
    asyncrl-inspect RUN --json ...                     the same information as lines of JSON
    asyncrl-inspect RUN --html page.html ...           a page with curves, and these groups token by token
    asyncrl-inspect RUN --trace trace.json             what every episode and process did, and when, for ui.perfetto.dev
    asyncrl-inspect RUN --reward 1: --rows             these episodes as rows to train on (mode=sft)
    asyncrl-inspect RUN OTHER --compare                which of two evaluations is better (mode=evaluate)

RUN is the folder of a run with record=true (for --trace: timelines.record=true), which may still be under way. The
colour of a token shows how likely the engine that generated it found it, from white (certain) to red. With --gap, it
shows how much the trainer's log-probability differs from the engine's. ⟨v7⟩ marks where version 7 of the weights takes
over.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from asyncrl.errors import AsyncRLError, RecordError, visible
from asyncrl.extensions.timelines import files, reader
from asyncrl.extensions.view.inspection import render
from asyncrl.extensions.view.inspection.page import estimator_of, page, section
from asyncrl.extensions.view.inspection.rows import Bounds, GroupFilter, GroupRow, bounds, rows_of, within
from asyncrl.extensions.view.recording import ViewedRecording
from asyncrl.jsonl import Tail, read_object
from asyncrl.schema import Trajectory

MOST_SHOWN = 100
"""Number of groups that are shown unless --limit says another."""
WIDTH = None if sys.stdout.isatty() else 200
"""Width of tables that are not shown in a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Show what is requested. Returns 0, or 1 after one line on stderr."""
    options = _parser().parse_args(argv)
    try:
        if options.compare or options.other:
            _compare(options)
            return 0
        if options.trace:
            print(f"{options.trace}: {_write_trace(options.run, options.trace)} spans")
            return 0
        recording = ViewedRecording(options.run)
        _show(recording, options, Console(highlight=False, soft_wrap=True, width=WIDTH))
    except (AsyncRLError, OSError) as error:
        print(visible(f"asyncrl-inspect: {error}"), file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`
        return 0
    return 0


def _compare(options: argparse.Namespace) -> None:
    """Print which of two evaluations is better. Raises AsyncRLError if nothing is installed that makes any."""
    try:
        from asyncrl.extensions.evaluate.figures import compared
    except ModuleNotFoundError:
        raise AsyncRLError("--compare needs the extension `evaluate`, which is not installed here") from None
    if not (options.compare and options.other):
        raise AsyncRLError("two runs and --compare go together: asyncrl-inspect RUN OTHER --compare")
    for line in compared(options.run, options.other, as_json=options.json):
        print(line)


def _write_trace(run: Path, file: Path) -> int:
    """Write the spans of a run, and return their number. Raises AsyncRLError if nothing is installed that makes
    them."""
    try:
        from asyncrl.extensions.observe.perfetto import write
        from asyncrl.extensions.observe.spans import TraceBuilder
    except ModuleNotFoundError:
        raise AsyncRLError("--trace needs the extension `observe`, which is not installed here") from None
    build = TraceBuilder()
    return write(file, (span for record in _records(run) for span in build.spans(record)))


def _records(run: Path) -> Iterator[files.Record]:
    """Yield the timelines of all processes. That of the rollout process comes first, since it tells the run's id."""
    folders = sorted(reader.processes(run), key=lambda folder: folder != files.ROLLOUT)
    if not folders:
        raise RecordError(f"{run} holds no timeline: was it made with timelines.record=true?")
    for folder in folders:
        for _, records in reader.read(run, folder):
            yield from records


def _show(recording: ViewedRecording, options: argparse.Namespace, console: Console) -> None:
    wanted = GroupFilter(
        options.uid, options.step, options.reason, options.task, options.reward, options.length, options.staleness
    )
    if wanted == GroupFilter() and not options.text and not options.html and not options.rows:
        _overview(recording, options, console)
        return
    groups, steps = rows_of(recording)
    limit = options.limit or (None if options.rows else MOST_SHOWN)
    rows = [row for row in groups if wanted.fits(row)][:limit]
    if options.rows:
        _print_rows(recording, options, rows)
        return
    if options.html:
        title = f"asyncrl {options.run.resolve().name}"
        estimator = estimator_of(_config(options.run))
        text = page(title, recording, steps, rows, _trained(options.run), render.decoder(options.run), estimator)
        options.html.write_text(text)
        print(f"{options.html}: {len(steps)} batches, {len(rows)} of {len(groups)} groups")
        return
    decode = render.decoder(options.run) if options.text else None
    if decode and not options.json and (told := _adapters(options.run)):
        console.print(told)
    for row in rows:
        group = recording.group(row.uid) if decode else None
        if options.json:
            content = {"group": json.loads(msgspec.json.encode(group))} if group else {}
            print(json.dumps({**asdict(row), **content}))
        elif group and decode:
            scores = recording.scores(int(row.place)).get(row.uid) if options.gap and row.place.isdigit() else None
            console.print(render.group_text(group, decode, scores))
    if not options.json and not decode:
        console.print(render.groups_table(rows))


def _print_rows(recording: ViewedRecording, options: argparse.Namespace, groups: Sequence[GroupRow]) -> None:
    """Print the episodes of these groups whose own reward and length are in the range as rows to train on."""
    from asyncrl.extensions.view.inspection import training_rows  # imported late, because tables do not need it

    decode = training_rows.decoder(options.run)

    def wanted(trajectory: Trajectory) -> bool:
        return within(trajectory.total, options.reward) and within(trajectory.num_tokens, options.length)

    for group in groups:
        for row in training_rows.rows(recording.group(group.uid), decode, wanted):
            print(json.dumps(row))


def _overview(recording: ViewedRecording, options: argparse.Namespace, console: Console) -> None:
    groups, steps = rows_of(recording)
    if options.json:
        for row in steps:
            uids = [group.uid for group in row.groups]
            print(json.dumps({"step": row.step, "groups": uids, "figures": row.figures}))
        return
    console.print(render.steps_table(steps, _trained(options.run)))
    console.print("groups: " + render.reasons_line(groups))
    if told := _adapters(options.run):
        console.print(told)
    if recording.torn:
        console.print(f"{recording.torn} bytes at the end belong to an incomplete frame and are ignored")


def _adapters(run: Path) -> str:
    """Return a line with the adapter of each role; empty if roles share one."""
    config = _config(run)
    roles = {name: section(config, "agents", "roles", name) for name in section(config, "agents", "roles")}
    plays = (
        f"{name} {one.get('adapter')}{', past versions' if one.get('past') else ''}" for name, one in roles.items()
    )
    return "adapters: " + "; ".join(plays) if roles else ""


def _config(run: Path) -> dict[str, Any]:
    """Read config.json; empty if there is none."""
    return read_object(run / "config.json") or {}


def _trained(run: Path) -> dict[int, dict[str, float]]:
    """Read the figures in metrics.jsonl, by step."""
    found = {}
    for number, line in enumerate(Tail(run / "metrics.jsonl")(), 1):
        figures = {name: value for name, value in line.items() if isinstance(value, int | float)}
        if not math.isfinite(figures.get("step", math.nan)):
            raise RecordError(f"{run / 'metrics.jsonl'}: line {number} has no step: repair the line, or delete it")
        found[int(figures["step"])] = figures
    return found


def _bounds(text: str) -> Bounds:
    try:
        return bounds(text)
    except RecordError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asyncrl-inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a recorded run")
    parser.add_argument("other", type=Path, metavar="OTHER", nargs="?", help="with --compare: folder of another one")
    parser.add_argument("--compare", action="store_true", help="say which of two evaluations is better")
    parser.add_argument("--step", type=int, help="show only groups of this batch")
    parser.add_argument("--uid", help="show only groups whose uid begins with this")
    parser.add_argument("--reason", help="show only groups that were rejected for this reason, or that are `ready`")
    parser.add_argument("--task", help="show only groups of this task")
    for name, what in (("reward", "reward"), ("length", "length in tokens"), ("staleness", "staleness in versions")):
        parser.add_argument(
            f"--{name}",
            type=_bounds,
            default=(None, None),
            metavar="A:B",
            help=f"show only groups with a trajectory whose {what} is in this range",
        )
    parser.add_argument(
        "--limit", type=int, help=f"maximum number of groups (default: {MOST_SHOWN}, and with --rows all)"
    )
    parser.add_argument(
        "--text", action="store_true", help="also show the text of the groups; with --json, all of their content"
    )
    parser.add_argument("--gap", action="store_true", help="colour the text by the gap between trainer and engine")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument(
        "--rows", action="store_true", help="print the episodes in the ranges as rows to train on, as lines of JSON"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace in Chrome's JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a self-contained HTML page")
    return parser


if __name__ == "__main__":
    sys.exit(main())
