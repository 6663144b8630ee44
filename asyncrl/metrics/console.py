"""Terminal output of a run, read from its files: one line per step, unless an extension draws the run on a terminal,
and the summary at the end."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import rich.console
from rich import markup
from rich.table import Table

from asyncrl.config import Config
from asyncrl.errors import visible
from asyncrl.extension import Display
from asyncrl.jsonl import Tail
from asyncrl.lookup import active

LONG_WAIT_SECONDS = 60.0
LONG_WAIT_STEPS = 10
"""A step is late after this time and this many times the usual one. Then the run says what it waits for."""
STALE_SECONDS = 10.0
"""Age of status.json from which on it is not shown: the rollout process hangs or has ended."""
SILENT = "the rollout process does not write status.json; see logs/"


class Console:
    """Follows the metric files of a run and prints new records. The launcher calls `follow` at every poll."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        out: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._run_dir, self._clock = config, run_dir, clock
        self._out = out or rich.console.Console(highlight=False)
        self._display: Display | None = None
        names = ("eval.jsonl", "warnings.jsonl", "metrics.jsonl")
        self._evaluations, self._warnings, self._steps = (Tail(run_dir / name, new=True) for name in names)
        self._warned: Counter[str] = Counter()  # by text with its numbers left out
        self._texts: dict[str, str] = {}  # the first text of each
        self._total = 0  # number of warnings
        self._rejected: Counter[str] = Counter()  # groups until the last step, by reason
        self._truncated: list[float] = []  # share of completions, by step
        self._waiting = ""  # the kind of wait before the first step that was shown last
        self._stepped_at, self._patience = 0.0, math.inf  # the last step, and after how long the next one is late
        self._first: tuple[int, float] | None = None  # step and time from which the remaining time is extrapolated
        self._recent: deque[tuple[float, float]] = deque(maxlen=10)

    def opening(self, differences: Sequence[str] = (), resumed: str | None = None, notes: Sequence[str] = ()) -> None:
        """Print what is about to start and the run folder. For a replay or a resumed run, also print its source and the
        settings that differ from it. `notes` are additional lines."""
        c, t = self._config, self._config.trainer
        layout = (
            f"trainer TP {t.tensor_parallel} × PP {t.pipeline_parallel} × CP {t.context_parallel} "
            f"× DP {t.data_parallel}"
        )
        if not c.trains:
            layout = "nothing is trained"
        if not c.generates:
            what = f"mode {escape(c.mode)}; {layout}"
        else:
            others = "".join(f"{role} {escape(one.model)}, " for role, one in c.frozen.items() if one.model)
            engines = c.engine.started + len(c.engine.urls)
            what = (
                f"on {escape(', '.join(c.mixture))}; {engines} engine(s), {others}{layout}; "
                f"lead {c.rollout.effective_lead}, staleness ≤ {c.rollout.max_staleness}"
            )
        self._print(f"[bold]{escape(c.run.name)}[/]: {escape(c.model.path)} {what}")
        for line in differences:
            self._print(f"changed setting  {escape(line)}")
        if resumed:
            self._print(f"resuming from {escape(resumed)}")
        for line in notes:
            self._print(escape(line))
        self._print(f"run folder {escape(str(self._run_dir))}")
        redraws = self._out.is_terminal and not self._out.is_dumb_terminal
        if redraws and self._config.metrics.console:
            hooks = [one.launch() for one in active(self._config).values()]
            displays = (one.display(self._config, self._run_dir, self._out) for one in hooks)
            self._display = next((one for one in displays if one), None)

    def follow(self, lines: Iterable[str] = ()) -> None:
        """Show the records written since the last call, and these lines."""
        for record in self._evaluations():
            self._print(self._evaluation(record))
            if self._display:
                self._display.evaluated(record)
        for record in self._warnings():
            self._warn(record)
            if self._display:
                self._display.warned()
        for line in lines:
            self._print(escape(line))
        for record in self._steps():
            self._truncated.append(float(record.get("completion/truncated") or 0.0))
            left, samples = self._seconds_left(record), self._samples_per_second(record)
            usual = median(seconds for _, seconds in self._recent)
            last = record["step"] == self._config.run.max_steps
            self._patience = math.inf if last else max(LONG_WAIT_SECONDS, LONG_WAIT_STEPS * usual)
            self._stepped_at = self._clock()
            if self._display:
                self._display.step(record, left, samples)
            else:
                self._print(self._line(record, left, samples))
        if self._display:
            self._display.draw()
        elif self._first is None and (wait := self._wait()) and kind_of(wait) != self._waiting:
            self._waiting = kind_of(wait)
            self._print(f"[dim]waiting[/]  {escape(wait)}")
        if (passed := self._clock() - self._stepped_at) >= self._patience:
            self._patience = 2 * passed
            self._print(f"[dim]waiting[/]  {passed:.0f} s since the last step; {escape(self._wait() or SILENT)}")

    def _warn(self, record: dict[str, Any]) -> None:
        """Show a warning, unless one that differs only in numbers and names of groups has been shown."""
        kind = kind_of(record["warning"])
        self._total += 1
        self._warned[kind] += 1
        if kind not in self._texts:
            first, *more = record["warning"].strip("\n").split("\n")
            first += " (more in warnings.jsonl)" if more else ""
            self._texts[kind] = first
            self._print(f"[yellow]warning[/]  version {record['version']}: {escape(first)}")

    def _wait(self) -> str:
        """Return what the run waits for; "" while the rollout process does not tell."""
        return str(status(self._run_dir).get("waiting_for", ""))

    def end(self) -> None:
        """Show the last records and how often warnings were repeated, and end the live view, however the run has
        ended."""
        self.follow()
        for kind, count in self._warned.items():
            if count > 1:
                self._print(
                    f"[yellow]warning[/]  {count} times, with other numbers or names: {escape(self._texts[kind])}"
                )
        self._warned.clear()
        if self._display:
            self._display.close()
            self._display = None

    def closing(self) -> None:
        """Print the summary as a table, and where to look next."""
        summary = json.loads((self._run_dir / "summary.json").read_text())
        table = Table(show_header=False, box=None)
        for name, value in summary.items():
            if name != "ledger":
                table.add_row(name, f"{value:.4g}" if isinstance(value, float) else escape(str(value)))
        ledger = summary.get("ledger") or {}
        rejected = ledger.get("groups", {}).get("rejected", {})
        for reason, count in sorted(rejected.items(), key=lambda one: -one[1]):
            table.add_row(f"groups rejected, {escape(reason)}", str(count))
        if shares := self._truncated:
            table.add_row("completions truncated", f"{fmean(shares):.0%}, in the last step {shares[-1]:.0%}")
        if self._texts:
            table.add_row("warnings", f"{self._total} of {len(self._texts)} kinds, in warnings.jsonl")
        if self._config.metrics.console:
            self._out.print(table)
        for what, where in self._next():
            self._print(f"[dim]{what:<18}[/] {escape(where)}")

    def _next(self) -> Iterator[tuple[str, str]]:
        """Yield what a finished run offers, and how to get there."""
        for one in active(self._config).values():
            yield from one.launch().offers(self._config, self._run_dir)
        if (self._run_dir / "hf").exists():
            yield "trained model", f"{self._run_dir}/hf"

    def _evaluation(self, r: dict[str, Any]) -> str:
        several = f"{r['set']}, " if len(self._config.eval_sets) > 1 else ""
        versions = str(r["version_min"]) + (f"..{r['version_max']}" if r["version_max"] > r["version_min"] else "")
        *_, highest = [None, *(name for name in r if name.startswith("pass@"))]
        return (
            f"[cyan]held out[/]  {several}version {versions}: "
            f"accuracy {r['accuracy']:.3f} of {r['questions']} questions"
            + (f", {highest} {r[highest]:.3f}" if highest else "")
            + (f"; {r['failed']} answers failed" if r["failed"] else "")
            + (f"; {r['skipped']} evaluations skipped meanwhile" if r["skipped"] else "")
        )

    def _line(self, r: dict[str, Any], left: float, samples_per_second: float) -> str:
        trained = ""
        if "loss" in r:
            gap = f"gap {r['logprob_gap/mean']:.3f}  " if "logprob_gap/mean" in r else ""
            trained = f"loss {r['loss']:+.4f}  grad {r['grad_norm']:.2f}  {gap}"
        return (
            f"step {r['step']:>4}/{self._config.run.max_steps}  [bold green]reward {r['reward/mean']:.3f}[/]  "
            f"{trained}stale {r['staleness/mean']:.1f}≤{r['staleness/max']}  "
            f"{r['time/step']:.1f}s (wait {r['time/wait_batch']:.1f} train {r.get('time/train', 0.0):.1f} "
            f"publish {r['time/publish']:.1f})  {samples_per_second:.0f} samples/s  "
            f"left {left // 60:.0f}:{left % 60:02.0f}"
            + self._lost(r)
            + ("  [bold red]bad step: gradient not applied[/]" if r.get("step/bad") else "")
        )

    def _lost(self, r: dict[str, Any]) -> str:
        """Return how many groups were rejected or failed since the last step, by reason."""
        prefix = "groups/rejected/"
        so_far = Counter({name.removeprefix(prefix): int(r[name]) for name in r if name.startswith(prefix)})
        new, self._rejected = so_far - self._rejected, so_far
        if not new:
            return ""
        return f"  [yellow]rejected {', '.join(f'{count} {escape(reason)}' for reason, count in new.most_common())}[/]"

    def _samples_per_second(self, r: dict[str, Any]) -> float:
        """Return the throughput over the last steps; batches arrive in bursts, so a single step says little."""
        self._recent.append((r["samples/generated"], r["time/step"]))
        return sum(samples for samples, _ in self._recent) / max(1e-9, sum(seconds for _, seconds in self._recent))

    def _seconds_left(self, r: dict[str, Any]) -> float:
        """Extrapolate from the pace since the first step, which excludes start-up."""
        if self._first is None:
            self._first = (r["step"] - 1, r["time/since_start"] - r["time/step"])
        steps, since = self._first
        return (self._config.run.max_steps - r["step"]) * (r["time/since_start"] - since) / (r["step"] - steps)

    def _print(self, text: str) -> None:
        if self._config.metrics.console:
            self._out.print(text, soft_wrap=True)


def status(run_dir: Path) -> dict[str, Any]:
    """Return status.json of a run; nothing while it is missing or old."""
    file = run_dir / "status.json"
    if not file.exists() or time.time() - file.stat().st_mtime > STALE_SECONDS:
        return {}
    return dict(json.loads(file.read_text()))


def kind_of(text: str) -> str:
    """Return a text without what differs between its repetitions: numbers, and names of groups."""
    return re.sub(r"\b[a-z]?\d[\w.]*", "#", text)


def escape(text: str) -> str:
    """Escape rich markup and terminal control sequences."""
    return markup.escape(visible(text))
