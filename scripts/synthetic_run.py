"""Folders of runs that never ran, for tests and benchmarks of the pages: settings, metrics, a recording, timelines and
status.json, in any size.

    python scripts/synthetic_run.py FOLDER --steps 20 --groups 8 --siblings 8
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.extensions.recording.events import Committed, Event, packed, scored
from asyncrl.extensions.recording.writer import RECORDS, TRAINER, Writer
from asyncrl.extensions.timelines import files
from asyncrl.extensions.timelines.files import Record
from asyncrl.observability.intervals import AGENT, DECODE, PREFILL, QUEUED, REWARD, TOOL, WAITING, Interval
from asyncrl.observability.timeline import (
    ROLLOUT,
    BatchTimeline,
    EpisodeTimeline,
    GroupTimeline,
    ProcessSpan,
    PublishTimeline,
)
from asyncrl.rollout.events import Admitted, Taken
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan

START = 1_700_000_000.0
"""When the runs began."""


@dataclass
class Plan:
    """Size of a synthetic run, and what is planted in it."""

    steps: int = 6
    groups: int = 4
    siblings: int = 4
    tokens: int = 12
    step_seconds: float = 10.0
    turns: int = 1
    """Turns of an episode; between two, a tool is called."""
    slow_tool: int | None = None
    """Batch whose last episode spends most of its time in the tool "search"."""
    slow_engine: bool = False
    """Whether the second of three engines generates at a fifth of the others' speed."""
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


class SyntheticRun:
    """Writer of one run, step by step, so that it can also play a run that is still going on."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan, self.step = folder, plan, 0
        self._random = random.Random(plan.seed)
        self._records: Writer[Event] = Writer(folder / RECORDS)
        self._scores: Writer[Event] = Writer(folder / RECORDS / TRAINER)
        self._timelines = {name: files.writer(folder, name) for name in (ROLLOUT, "trainer 0")}
        config = {"run": {"name": "synthetic", "max_steps": plan.steps}, "algo": {"advantage": {"name": "grpo"}}}
        (folder / "config.json").write_text(json.dumps({**config, **plan.config}))
        (folder / ".asyncrl-run").touch()
        self._evaluated(0)
        self._status()

    def advance(self) -> None:
        """Play one step, and flush it to the files."""
        step, groups = self.step, [self._group(number) for number in range(self.plan.groups)]
        for group in groups:
            self._records.write(Admitted(group.slot, step, step, f"p{group.slot}", self.plan.siblings))
            self._records.write(Committed(group.slot, packed(group), 0))
        self._records.write(Taken(step, [group.uid for group in groups], {}))
        tokens = [
            logprob - 0.01
            for group in groups
            for one in group.trajectories
            for t in one.turns
            for logprob in t.completion.logprobs
        ]
        self._scores.write(scored(step, tokens))
        for process, records in self._timeline(groups).items():
            for record in records:
                self._timelines[process].write(record)
        for writer in self._writers():
            writer.flush()
        self.step += 1
        self._append("metrics.jsonl", self._metrics(groups))
        if self.step % 4 == 0:
            self._evaluated(self.step)
        self._status()

    def record(self, group: Group) -> None:
        """Record another group, with its images, that no batch takes."""
        self._records.write(Committed(group.slot, packed(group), 0), group.images)
        self._records.flush()

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers():
            writer.close()

    def _writers(self) -> list[Writer[Any]]:
        return [self._records, self._scores, *self._timelines.values()]

    # -- content -------------------------------------------------------------------------------------------

    def _group(self, number: int) -> Group:
        slot = self.step * self.plan.groups + number
        trajectories = [self._trajectory(slot, sibling) for sibling in range(self.plan.siblings)]
        return Group(f"g{slot:06d}", slot, [1, 2, 3 + number], trajectories, ("sum", "sort")[number % 2])

    def _trajectory(self, slot: int, sibling: int) -> Trajectory:
        old, count = max(0, self.step - 1), max(2, self.plan.tokens // self.plan.turns)
        spans = [VersionSpan(old, 0, count // 2), VersionSpan(self.step, count // 2, count)]
        turns = [
            Turn([7, 8] if turn else [], Completion(
                [(slot + sibling + place) % 200 for place in range(count)],
                [-self._random.expovariate(2.0) for _ in range(count)],
                spans, "stop" if sibling else "length"))
            for turn in range(self.plan.turns)
        ]  # fmt: skip
        return Trajectory(turns, float(self._random.random() < 0.2 + 0.5 * self.step / max(1, self.plan.steps)))

    def _metrics(self, groups: list[Group]) -> dict[str, float]:
        rewards = [one.total for group in groups for one in group.trajectories]
        seconds, tokens = self.plan.step_seconds, sum(group.num_tokens for group in groups)
        return {
            "step": self.step, "version": self.step, "reward/mean": sum(rewards) / len(rewards),
            "completion/length": tokens / len(rewards), "completion/truncated": 1 / self.plan.siblings,
            "staleness/mean": 1.0, "staleness/max": 1, "logprob_gap/mean": 0.01, "logprob_gap/p99": 0.05,
            "groups/signal": sum(group.has_signal for group in groups) / len(groups), "loss": -0.1, "grad_norm": 0.5,
            "tokens/generated": tokens, "tokens/trained": tokens, "samples/generated": len(rewards),
            "time/step": seconds, "time/wait_batch": 0.3 * seconds, "time/train": 0.6 * seconds,
            "time/publish": 0.1 * seconds, "time/engine_busy": seconds, "engines/running": 20, "engines/queued": 0,
            "engines/cache_use": 0.4, "engines/prefill_wasted": 0.0,
        }  # fmt: skip

    def _timeline(self, groups: list[Group]) -> dict[str, list[Record]]:
        seconds, step = self.plan.step_seconds, self.step
        begins = START + step * seconds
        late = len(groups) - 1
        played = [
            self._played(group, begins, slow=step == self.plan.slow_tool and n == late)
            for n, group in enumerate(groups)
        ]
        ready = max(group.ended for group in played)
        asked = begins + 0.6 * seconds
        taken = max(asked, ready)
        last = max(played, key=lambda group: group.ended).uid
        parts = (
            ("wait_batch", asked - taken, 0.0),
            ("forward", 0.0, 0.2),
            ("backward", 0.2, 0.3),
            ("publish", 0.3, 0.4),
        )
        spans: list[Record] = [
            ProcessSpan("trainer 0", name, taken + start * (1 if start < 0 else seconds), taken + end * seconds, step)
            for name, start, end in parts
        ]
        publish = PublishTimeline(step + 1, taken + 0.3 * seconds, taken + 0.35 * seconds)
        batch = BatchTimeline(step, asked, taken, [group.uid for group in groups], last)
        return {ROLLOUT: [*played, batch, publish], "trainer 0": spans}

    def _played(self, group: Group, begins: float, *, slow: bool) -> GroupTimeline:
        episodes = [
            self._episode(one, begins, slow=slow and sibling == len(group.trajectories) - 1)
            for sibling, one in enumerate(group.trajectories)
        ]
        ended = max(episode.intervals[-1].end for episode in episodes)
        waited = [
            EpisodeTimeline(one.reward, one.tokens, [*one.intervals, Interval(WAITING, one.intervals[-1].end, ended)])
            for one in episodes
        ]
        return GroupTimeline(
            group.uid, group.slot, group.task, "training", self.step, begins, ended, "committed", waited
        )

    def _episode(self, one: Trajectory, begins: float, *, slow: bool) -> EpisodeTimeline:
        seconds, now, found = self.plan.step_seconds, begins, list[Interval]()

        def spend(phase: str, share: float, name: str = "", version: int = -1) -> None:
            nonlocal now
            until = now + share * seconds
            found.append(Interval(phase, now, until, name, version))
            now = until

        spend(QUEUED, 0.02 * self._random.random())
        for turn in range(self.plan.turns):
            if turn:
                spend(TOOL, 0.02 + (0.5 if slow else 0.02 * self._random.random()), "search")
            spend(PREFILL, 0.01)
            for version in (max(0, self.step - 1), self.step):
                spend(DECODE, (0.1 + 0.1 * self._random.random()) / self.plan.turns, "", version)
        spend(AGENT, 0.005)
        spend(REWARD, 0.01, "math")
        return EpisodeTimeline(one.reward, one.num_tokens, found)

    def _status(self) -> None:
        engines = [
            {
                "url": f"http://127.0.0.1:{30000 + number}", "state": "serving", "version": self.step, "running": 20,
                "waiting": 0, "used": 400.0, "capacity": 1000.0, "prefilled": 5000.0, "prefill_seconds": 1.0,
                "tokens_per_s": 200.0 if number == 1 and self.plan.slow_engine else 1000.0,
            }
            for number in range(3)
        ]  # fmt: skip
        episodes = [{"phase": "decode", "waits_for": "the next chunk", "seconds": 0.5, "tokens": 12}] * 2
        group = {"uid": "g999999", "task": "sum", "born": self.step, "tokens": 24, "seconds": 0.5, "episodes": episodes}
        status = {
            "time": START + self.step, "version": self.step, "waiting_for": "batch waits for 1 group", "batch": None,
            "holding": False, "episodes": {"decode": 2}, "groups": [group], "groups_left_out": 0, "engines": engines,
        }  # fmt: skip
        partial = self.folder / "status.json.partial"
        partial.write_text(json.dumps(status))
        partial.rename(self.folder / "status.json")

    def _evaluated(self, version: int) -> None:
        accuracy = min(1.0, 0.2 + 0.6 * version / max(1, self.plan.steps))
        self._append("eval.jsonl", {"set": "sum", "version_min": version, "version_max": version, "accuracy": accuracy})

    def _append(self, name: str, row: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


def make(folder: Path, plan: Plan | None = None) -> Path:
    """Write a whole run, and return its folder."""
    run = SyntheticRun(folder, plan or Plan())
    for _ in range(run.plan.steps):
        run.advance()
    run.close()
    return folder


def main() -> None:
    """Write the run that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name in ("steps", "groups", "siblings", "tokens", "turns"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Plan, name))
    options = vars(parser.parse_args())
    make(options.pop("folder"), Plan(**options))


if __name__ == "__main__":
    main()
