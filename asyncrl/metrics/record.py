"""Spans, and one record per step, built from the reports of trainer and rollout process."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from asyncrl.schema import Batch, Group, Trajectory

if TYPE_CHECKING:
    from asyncrl.extension import StepListener

Step = dict[str, float]


class StepLog:
    """Collects the spans and metrics of a step, keeps what the summary needs, and passes each record to the sinks."""

    def __init__(
        self,
        sinks: Sequence[Callable[[Step], None]],
        *,
        started_at: float,
        tasks: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        begins: Callable[[str, int], None] = lambda span, step: None,
        ended: Callable[[str, int, float, float], None] = lambda span, batch, start, end: None,
        listeners: Sequence[StepListener] = (),
        written: int = 0,
    ) -> None:
        """Create the log. `started_at` is the wall-clock time (time.time) of the command; `tasks` are the training
        tasks; `begins` is called with the name of every span and its step, again after a span within it, and
        `ended` with the number of the batch and the wall-clock times; `listeners` also receive the batches.
        Steps up to `written` have been passed on already, by trainers that died."""
        self._written = written
        self._listeners = listeners
        self._sinks = sinks
        self._tasks = tasks
        self._clock = clock
        self._begins = begins
        self._ended = ended
        self._offset = time.time() - started_at - clock()
        self._before = 0.0  # seconds spent by earlier runs that this one resumes
        self._spans: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self._open: list[str] = []
        self._last_end: float | None = None
        self._first_batch: float | None = None
        self.steps: list[Step] = []
        self.staleness: Counter[int] = Counter()

    def counters(self) -> dict[str, Any]:
        """Return the state for a checkpoint. It excludes the steps, which are in metrics.jsonl."""
        return {"staleness": dict(self.staleness)}

    def restore(self, counters: dict[str, Any], steps: list[Step]) -> None:
        """Restore the state after these steps; time/since_start continues from the last of them."""
        self.staleness = Counter({int(age): count for age, count in counters["staleness"].items()})
        self.steps = list(steps)
        self._before = steps[-1]["time/since_start"] if steps else 0.0

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure the duration of the block and add it to time/NAME of the current step."""
        began, started, batch = self._clock(), time.time(), len(self.steps)
        self._begins(name, batch + 1)
        self._open.append(name)
        try:
            yield
        finally:
            self._open.pop()
            if self._open:
                self._begins(self._open[-1], batch + 1)
            seconds = self._clock() - began
            self._spans[f"time/{name}"] = self._spans.get(f"time/{name}", 0.0) + seconds
            self._started[name] = started
            self._ended(name, batch, started, started + seconds)

    def step(self, version: int, batch: Batch, figures: dict[str, float], sent: dict[str, float]) -> Step:
        """Close a step and pass its record to the sinks. The first step begins when its batch arrives, so that start-up
        is excluded."""
        now = self._clock()
        if self._last_end is None:
            self._first_batch = self._last_end = now - self._spans.get("time/train", 0.0) - self._spans["time/publish"]
            self._spans["time/wait_batch"] = 0.0
            batch.rollout["time/engine_busy"] = min(batch.rollout["time/engine_busy"], now - self._first_batch)
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        rewards = [trajectory.total for trajectory in trajectories]
        staleness = [value for group in batch.groups for value in group.staleness(batch.version)]
        completions = [turn.completion for trajectory in trajectories for turn in trajectory.turns]
        self.staleness.update(staleness)
        record: Step = {
            "step": version,
            "version": version,
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "groups/signal": _signal(batch.groups),
            **self._by_task(batch.groups),
            **_by_role(trajectories),
            "episodes/turns": statistics.fmean(len(trajectory.turns) for trajectory in trajectories),
            "episodes/cuts": statistics.fmean(trajectory.cuts for trajectory in trajectories),
            "prompt/length": statistics.fmean(len(group.prompt_ids) for group in batch.groups),
            "completion/length": statistics.fmean(len(completion.token_ids) for completion in completions),
            "completion/truncated": statistics.fmean(
                completion.finish_reason == "length" for completion in completions
            ),
            "staleness/mean": statistics.fmean(staleness),
            "staleness/max": max(staleness),
            "staleness/mixed": statistics.fmean(
                len({span.version for turn in t.turns for span in turn.completion.versions}) > 1 for t in trajectories
            ),
            **batch.rollout,
            **figures,
            **self._spans,
            "time/pause": sent["pause"],
            "time/verify": sent["verify"],
            **({"time/publish_background": sent["background"]} if "background" in sent else {}),
            "engines/serving": sent["engines"],
            "bytes/published": sent["bytes"],
            **{name: value for name, value in sent.items() if "/" in name},  # of the weights that were sent
            "time/step": now - self._last_end,
            "time/since_start": now + self._offset + self._before,
        }
        if "fill" in sent:
            began = self._started["publish"]
            self._ended("gather", len(self.steps), began, began + sent["fill"])
        self._last_end, self._spans = now, {}
        self.steps.append(record)
        if version <= self._written:
            return record
        for sink in self._sinks:
            sink(record)
        for listener in self._listeners:
            listener.write(record, batch)
        return record

    def close(self) -> bool:
        """Close the listeners. Return whether all of them have ended."""
        ended = [listener.close() for listener in self._listeners]
        return all(ended)

    def _by_task(self, groups: Sequence[Group]) -> Step:
        """Return the metrics of each task in the batch; none if training has only one task."""
        figures: Step = {}
        for task in self._tasks if len(self._tasks) > 1 else ():
            mine = [group for group in groups if group.task == task]
            figures[f"groups/batch/{task}"] = len(mine)
            if mine:
                rewards = [trajectory.total for group in mine for trajectory in group.trajectories]
                figures[f"reward/mean/{task}"] = statistics.fmean(rewards)
                figures[f"groups/signal/{task}"] = _signal(mine)
        return figures

    def summary(self, window: int) -> dict[str, Any]:
        """Aggregate the steps to the metrics of the whole run."""
        steps = self.steps

        def total(name: str) -> float:
            return sum(step.get(name, 0.0) for step in steps)

        duration = max(1e-9, total("time/step"))
        return {
            "steps": len(steps),
            "reward/first": statistics.fmean(step["reward/mean"] for step in steps[:window]),
            "reward/last": statistics.fmean(step["reward/mean"] for step in steps[-window:]),
            "tokens/generated": total("tokens/generated"),
            "tokens/trained": total("tokens/trained"),
            "tokens_per_s/generated": total("tokens/generated") / duration,
            "tokens_per_s/trained": total("tokens/trained") / duration,
            "samples_per_s": total("samples/generated") / duration,
            "staleness/histogram": {str(age): count for age, count in sorted(self.staleness.items())},
            "share/trainer_idle": total("time/wait_batch") / duration,
            "share/publish": total("time/publish") / duration,
            "share/engine_busy": total("time/engine_busy") / duration,
            "pause/mean": total("time/pause") / len(steps),
            **_mean("logprob_gap/mean", steps),
            "step_time/median": statistics.median(step["time/step"] for step in steps),
            "time/start_up": (self._first_batch or 0.0) + self._offset,
            "time/total": self._clock() + self._offset + self._before,
        }


def accuracies(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the accuracies for the summary from the records of the first and the last evaluation: the mean over the
    sets and, if there are several, the accuracy of each."""
    figures: dict[str, float | None] = {}
    for when, lines in (("before", before), ("after", after)):
        figures[f"accuracy/{when}"] = statistics.fmean(line["accuracy"] for line in lines) if lines else None
        if len(lines) > 1:
            figures |= {f"accuracy/{when}/{line['set']}": line["accuracy"] for line in lines}
    return figures


def dtype_figures(machine: dict[str, Any]) -> dict[str, str]:
    """Return the number format of each part, with its reason, from machine.json for the summary."""
    return {f"dtype/{part}": f"{choice['dtype']} ({choice['why']})" for part, choice in machine["dtype"].items()}


def _mean(name: str, steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean of a metric over the steps that have it; empty if none does, as without training."""
    found = [step[name] for step in steps if name in step]
    return {name: statistics.fmean(found)} if found else {}


def _by_role(trajectories: Sequence[Trajectory]) -> Step:
    """Return the mean reward of each named role."""
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for role, reward in trajectory.totals().items():
            rewards.setdefault(role, []).append(reward)
    return {f"reward/role/{role}": statistics.fmean(found) for role, found in rewards.items() if role}


def _signal(groups: Sequence[Group]) -> float:
    return statistics.fmean(group.has_signal for group in groups)
