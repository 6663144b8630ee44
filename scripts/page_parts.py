"""What the live page takes in a real browser, for scripts/bench_observe.py.

    python -m scripts.page_parts [--quick]

page_first_paint_s        from the address to the first chart, of a run of 10,000 steps
page_recording_s          from the address to the newest groups of a recording of 1 GB
page_scan_s               until all of its groups were read, so that every filter is complete
page_events_per_s         intervals of a batch of 10,000 episodes, over the seconds from its address to its rows
page_frame_ms             time of drawing one frame while all of its rows scroll by: median and 99th percentile
page_frames_per_s         frames of the browser meanwhile
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.extensions.recording.events import Committed, Event, PackedGroup, PackedTurn
from asyncrl.extensions.recording.writer import RECORDS, Writer
from asyncrl.extensions.view.watch.timelines import TimelineIndex
from asyncrl.rollout.events import Taken
from asyncrl.schema import VersionSpan
from scripts import machine
from scripts.synthetic_run import Plan, make

STEPS, EPISODES, RECORDED = 10_000, 10_000, 1 << 30
QUICK = 20
"""A quick run has this fraction of it all."""
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRAWN = ".anatomy canvas[data-rows]"
SCROLL = """async () => {
  const place = document.querySelector('.anatomy'), canvas = place.querySelector('canvas'), times = [];
  const began = performance.now();
  for (let frame = 0; frame < 300; frame += 1) {
    place.scrollTop = (place.scrollHeight - place.clientHeight) * frame / 299;
    await new Promise(requestAnimationFrame);
    await new Promise(requestAnimationFrame);
    times.push(canvas.drawn.milliseconds);
  }
  return { times, seconds: (performance.now() - began) / 1000, frames: 600 };
}"""


def page(folder: Path, *, quick: bool, settings: Sequence[str] = ()) -> dict[str, float]:
    """Measure the page in Chromium, by playwright, where there is one. It starts no run, which `settings` could
    change."""
    if BROWSER is None:
        print("page_...: needs chromium (Debian: apt-get install chromium)", file=sys.stderr)
        return {}
    from playwright.sync_api import sync_playwright

    share = QUICK if quick else 1
    large_run(folder / "long", STEPS // share)
    large_recording(folder / "recorded", RECORDED // share)
    make(folder / "wide", Plan(steps=1, groups=EPISODES // 8 // share, siblings=8, turns=3, tokens=6))
    with serving(folder) as address, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.goto(address)
        tab.wait_for_selector(".run")
        figures = {"page_first_paint_s": _open(tab, "view=overview&run=long", "figure[data-chart=Reward] canvas")}
        began = time.perf_counter()
        figures["page_recording_s"] = _open(tab, "view=episodes&run=recorded", ".panel .token")
        tab.wait_for_selector("p.told:not(:has-text('reading'))", timeout=300_000)
        figures["page_scan_s"] = time.perf_counter() - began
        figures["page_events_per_s"] = intervals(folder / "wide") / _open(tab, "view=batches&run=wide", DRAWN)
        figures |= _scrolled(tab)
        browser.close()
        return figures


def intervals(run: Path) -> int:
    """Count the intervals of the first batch."""
    index = TimelineIndex(run)
    index.refresh()
    return sum(len(one.intervals) for group in index.groups(index.batches[0]) for one in group.episodes)


def _open(tab: Any, state: str, selector: str) -> float:
    """Load the page anew with something to show, and return the seconds until it is there."""
    address = tab.url.partition("#")[0]
    tab.goto("about:blank")
    began = time.perf_counter()
    tab.goto(f"{address}#{state}")
    tab.wait_for_selector(selector, timeout=120_000)
    return time.perf_counter() - began


def _scrolled(tab: Any) -> dict[str, float]:
    found = tab.evaluate(SCROLL)
    times = sorted(found["times"])
    return {
        "page_frame_ms/p50": statistics.median(times),
        "page_frame_ms/p99": times[int(0.99 * len(times))],
        "page_frames_per_s": found["frames"] / found["seconds"],
    }


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Run asyncrl-watch, and yield the address of its page."""
    command = [sys.executable, "-m", "asyncrl.extensions.view.watch.cli", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout
        try:
            yield served.stdout.readline().split()[-1]
        finally:
            served.terminate()


def large_run(folder: Path, steps: int) -> None:
    """Write the metrics of a run with many steps."""
    make(folder, Plan(steps=1))
    row = json.loads((folder / "metrics.jsonl").read_text())
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(2, steps + 1):
            file.write(json.dumps({**row, "step": step, "version": step, "reward/mean": step / steps}) + "\n")


def large_recording(folder: Path, size: int) -> None:
    """Record groups of eight answers of 2,000 tokens until the files have about this size."""
    make(folder, Plan(steps=1))
    writer: Writer[Event] = Writer(folder / RECORDS)
    step, length = 0, 2000
    while writer.written < size:
        step += 1
        uids = [f"g{slot:08d}" for slot in range(16 * step, 16 * step + 16)]
        for uid in uids:
            turns = [_turn(length) for _ in range(8)]
            group = PackedGroup(uid, 0, b"\1\0\0\0" * 200, [([turn], 1.0) for turn in turns], "large", None)
            writer.write(Committed(0, group, 0))
        writer.write(Taken(step, uids, {}))
        writer.flush()
    writer.close()


def _turn(length: int) -> PackedTurn:
    """Return a turn whose tokens and log-probabilities compress as little as real ones."""
    ids = (np.frombuffer(os.urandom(2 * length), "<u2") % 50_000).astype("<i4").tobytes()
    logprobs = (-np.frombuffer(os.urandom(2 * length), "<u2") / 65_536.0).astype("<f4").tobytes()
    return PackedTurn(b"", ids, logprobs, [VersionSpan(0, 0, length)], "stop", 0.0, b"", b"", None)


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"one {QUICK}th of the steps, episodes and bytes")
    this = machine.report()
    with tempfile.TemporaryDirectory(prefix="asyncrl-page-") as folder:
        figures = page(Path(folder), quick=parser.parse_args().quick)
    print(json.dumps({**{name: round(value, 4) for name, value in figures.items()}, "machine": this}))


if __name__ == "__main__":
    main()
