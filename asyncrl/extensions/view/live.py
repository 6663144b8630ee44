"""The live view of a run on a terminal: progress, reward, times, episodes, engines and warnings, in a few lines that
are redrawn."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.config import Config
from asyncrl.errors import visible
from asyncrl.metrics.console import status

REFRESH_SECONDS = 0.25
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the last values as bars, of which the lowest and the highest span the whole height."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    return "".join(BARS[round((one - low) / (high - low) * (len(BARS) - 1)) if high > low else 0] for one in shown)


class LiveView:
    """Draws the view on a terminal until it is closed."""

    def __init__(self, config: Config, run_dir: Path, out: rich.console.Console) -> None:
        self._config, self._run_dir, self._out = config, run_dir, out
        self._rewards: deque[float] = deque(maxlen=200)
        self._step: dict[str, Any] = {}
        self._left = self._samples = 0.0
        self._accuracy: dict[str, str] = {}
        self._warnings, self._drawn = 0, 0.0
        self._live = Live(console=out, auto_refresh=False)
        self._live.start()
        out.show_cursor(True)  # a launcher that is killed could not bring it back

    def step(self, record: dict[str, Any], left: float, samples_per_second: float) -> None:
        """Take a step's record, the seconds that are left, and the throughput."""
        self._step, self._left, self._samples = record, left, samples_per_second
        self._rewards.append(record["reward/mean"])

    def evaluated(self, line: dict[str, Any]) -> None:
        """Take a line of eval.jsonl."""
        name = f"{line['set']} " if len(self._config.eval_sets) > 1 else ""
        self._accuracy[name] = f"{name}{line['accuracy']:.3f} (version {line['version_max']})"

    def warned(self) -> None:
        """Count a warning, whose text is printed above the view."""
        self._warnings += 1

    def draw(self) -> None:
        """Redraw the view, at most every REFRESH_SECONDS."""
        if (now := time.monotonic()) - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            self._live.update(self._table(status(self._run_dir)), refresh=True)

    def close(self) -> None:
        """Leave the view as it is, and stop redrawing."""
        self._live.update(self._table({}), refresh=True)
        self._live.stop()

    def _table(self, state: dict[str, Any]) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True, min_width=len("waiting for"))
        table.add_column(no_wrap=True, overflow="ellipsis")
        if self._step:
            table.add_row("progress", self._progress())
            table.add_row("reward", self._reward())
            table.add_row("step", _times(self._step, self._samples))
        if state:
            table.add_row("episodes", Text(_episodes(state)))
            table.add_row("engines", Text(_engines(state["engines"])))
        if state and not self._step:
            table.add_row("waiting for", Text(visible(state["waiting_for"])))
        if self._warnings:
            table.add_row("warnings", Text(f"{self._warnings}, in warnings.jsonl", "yellow"))
        return table

    def _progress(self) -> Table:
        step, steps = self._step["step"], self._config.run.max_steps
        row = Table.grid(padding=(0, 1))
        left = f"{self._left // 60:.0f}:{self._left % 60:02.0f}"
        bar = ProgressBar(total=steps, completed=step, width=max(10, self._out.width // 3))
        row.add_row(Text(f"{step}/{steps}"), bar, Text(f"left {left}"))
        return row

    def _reward(self) -> Text:
        text = Text(f"{self._rewards[-1]:.3f} ", "bold green")
        text.append(sparkline(self._rewards, self._out.width // 3), "green")
        if self._accuracy:
            text.append("  held out " + ", ".join(map(visible, self._accuracy.values())), "cyan")
        return text


def _times(step: dict[str, Any], samples: float) -> Text:
    text = Text.styled("bad step: gradient not applied  " if step.get("step/bad") else "", "bold red")
    parts = f"wait {step['time/wait_batch']:.1f} train {step.get('time/train', 0.0):.1f} publish"
    times = f"{step['time/step']:.1f} s ({parts} {step['time/publish']:.1f})  {samples:.0f} samples/s"
    text.append(f"{times}  stale {step['staleness/mean']:.1f}≤{step['staleness/max']}")
    if "logprob_gap/mean" in step:
        text.append(f"  gap {step['logprob_gap/mean']:.3f}")
    return text


def _episodes(state: dict[str, Any]) -> str:
    phases = Counter(state["episodes"]).most_common()
    groups = state["ledger"]["groups"]
    held = "  held back for a publish" if state["holding"] else ""
    return ", ".join(f"{count} {phase}" for phase, count in phases if count) + (
        f"  ({groups['running']} groups running, {groups['ready']} ready){held}"
    )


def _engines(engines: Sequence[dict[str, Any]]) -> str:
    serving = [one for one in engines if one["state"] == "serving"]

    def total(name: str) -> float:
        return sum(one.get(name) or 0.0 for one in serving)

    return (
        f"{len(serving)} of {len(engines)} answer  {total('running'):.0f} requests, {total('waiting'):.0f} queued  "
        f"{total('tokens_per_s'):.0f} tokens/s  cache {100 * total('used') / max(1.0, total('capacity')):.0f} %"
    )
