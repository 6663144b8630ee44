"""Held-out evaluation: the rollout engines answer questions that training never draws, concurrently with training.

Evaluation holds no ticket, and its tokens are counted separately. Weights may change while it runs; its lines name the
versions that answered. With weights.lora=versions it keeps the adapters that it began with, and past versions that play
roles are the newest ones. At most `eval.max_running` questions are in flight. That bounds the evaluation requests
queued ahead of training requests in an engine; engines serve both first come, first served, so that neither starves.

waits for     the answers (the client's deadlines), and a free place under eval.max_running
unblocked by  every question that is answered; the last evaluation of a run has the trainer's deadline
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from asyncrl.config import EvalConfig
from asyncrl.engine.client import GenerationClient
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import AsyncRLError
from asyncrl.rollout.timelines import Timelines
from asyncrl.schema import Prompt, Trajectory
from asyncrl.tasks import Task

Attempts = Callable[[Prompt, Sequence[GenerationSession]], Awaitable[Sequence["Attempt"]]]
"""Plays and scores all attempts at a question."""
Line = dict[str, Any]
"""One line of eval.jsonl: one set in one evaluation."""
Attempt = Trajectory | AsyncRLError
"""A finished episode, or the error that ended it. Of the attempts at a question the first one is greedy."""


class Evaluations:
    """The evaluations of a run, one at a time."""

    def __init__(
        self,
        attempts: Attempts,
        client: GenerationClient,
        tasks: Mapping[str, Task],
        sets: Mapping[str, Sequence[Prompt]],
        settings: EvalConfig,
        write: Callable[[Sequence[Line]], None],
        timelines: Timelines | None = None,
        earlier: Sequence[Line] = (),
    ) -> None:
        """`write` receives the lines of an evaluation. Without evaluation sets there is nothing to do. `earlier` are
        the lines so far, if this process was started again: their evaluations are not repeated."""
        self._earlier = earlier
        self._attempts = attempts
        self._client = client
        self.tasks = tasks
        self.sets = sets
        self._settings = settings
        self._write = write
        self._timelines = timelines or Timelines()
        self._room = asyncio.Semaphore(settings.max_running)
        self._serial = itertools.count()
        self._running: asyncio.Task[list[Line]] | None = None
        self.newest: int | None = None
        """The version that was published last."""
        self.evaluated: int | None = None
        """The newest version when the last evaluation began."""
        self._skipped = 0
        self.ready = asyncio.Event()
        """Set, except in a process that continues a run, until `go_on`: its agents and environments may not run yet."""
        self.ready.set()

    def published(self, version: int) -> None:
        """Start an evaluation if one is due at this version and none is running. Raises the error of the previous one,
        if any."""
        if not self.ready.is_set():
            return  # `go_on` is told of this version
        self.newest = version
        if self._running and self._running.done():
            self._running.result()  # its error ends the run here, not at its very end
            self._running = None
        if not self.sets or not self._settings.every or version % self._settings.every:
            return
        if self._running:
            self._skipped += 1
        elif not self._written():
            self.begin()

    def begin(self) -> None:
        """Start an evaluation in the background. None may be running."""
        self._running = asyncio.create_task(self._evaluate())
        self.evaluated = self.newest

    def go_on(self, evaluated: int | None, since: range, *, running: bool) -> None:
        """Continue a run whose last evaluation began at the version `evaluated`: with that one, if it was running, and
        with those that are due at the versions `since`. What was written already is not repeated."""
        self.newest = self.evaluated = evaluated
        if running and not self._written():
            self.begin()
        self.newest = since.start - 1
        self.ready.set()
        for version in since:
            self.published(version)

    def _written(self) -> list[Line]:
        """Return the lines of an evaluation of the newest version that an earlier process wrote. No earlier evaluation
        has only tokens of this version."""
        if not self._earlier:
            return []
        version = self._client.inflight.version if self.newest is None else self.newest
        return [line for line in self._earlier if line["version_min"] >= version][-len(self.sets) :]

    @property
    def under_way(self) -> bool:
        """True while an evaluation is running and its lines are not written yet."""
        return self._running is not None and not self._running.done()

    async def now(self) -> list[Line]:
        """Return the lines of an evaluation of the newest version: of the one that has begun with it, or of a new one,
        after the one that may be running. It goes on when a request for it is cancelled, and the next one shares it."""
        await self.ready.wait()
        if running := self._running:
            lines = await asyncio.shield(running)
            if self._running is not running and self._running:
                return await asyncio.shield(self._running)
            if self.evaluated is not None and self.evaluated == self.newest:
                return lines
        if written := self._written():
            return written
        self.begin()
        assert self._running
        return await asyncio.shield(self._running)

    async def _evaluate(self) -> list[Line]:
        """Evaluate every set, and write all lines together."""
        started, self._skipped = time.monotonic(), 0
        inflight = self._client.inflight
        with inflight.served.held(inflight.version) as pinned:
            async with asyncio.TaskGroup() as group:
                asked = {
                    name: [group.create_task(self.ask(prompt, pinned)) for prompt in prompts]
                    for name, prompts in self.sets.items()
                }
        seconds = time.monotonic() - started
        lines = []
        for name, tasks in asked.items():
            figures = summarize(name, [task.result() for task in tasks], self.tasks[name].correct)
            lines.append({**figures, "skipped": self._skipped, "time/eval": seconds})
        self._write(lines)
        return lines

    async def ask(self, prompt: Prompt, pinned: int | None = None) -> Sequence[Attempt]:
        """Return all answers to one question. They share an engine, and the sampled ones share a request."""
        async with self._room:
            name = f"e{next(self._serial):010d}"
            temperatures = [0.0, *[self._settings.temperature] * self._settings.samples]
            sessions = [
                self._client.generate(
                    one,
                    group=name,
                    purpose="evaluation",
                    sample=f"{prompt.uid} {number}",
                    pinned=pinned,
                    born=pinned,
                )
                for number, one in enumerate(temperatures)
            ]
            played = await self._attempts(prompt, sessions)
        self._timelines.evaluated(name, prompt, sessions, played)
        return played


def summarize(name: str, questions: Sequence[Sequence[Attempt]], correct: Callable[[float], bool]) -> Line:
    """Return the figures of one set. Failed attempts are counted and left out. Raises AsyncRLError when no greedy one
    is left."""
    attempts = [attempt for question in questions for attempt in question]
    failures = [attempt for attempt in attempts if not isinstance(attempt, Trajectory)]
    greedy = _played(question[0] for question in questions)
    if not greedy:
        raise AsyncRLError(f"evaluation: no question of {name} could be answered; the last failed with: {failures[-1]}")
    versions = [span.version for one in _played(attempts) for turn in one.turns for span in turn.completion.versions]
    return {
        "set": name,
        "version_min": min(versions),
        "version_max": max(versions),
        "questions": len(questions),
        "failed": len(failures),
        "accuracy": fmean(correct(one.total) for one in greedy),
        "reward/mean": fmean(one.total for one in greedy),
        "tokens/mean": fmean(one.num_tokens for one in greedy),
        **_pass_at_powers([[correct(one.total) for one in _played(question[1:])] for question in questions]),
    }


def pass_at(k: int, right: int, samples: int) -> float:
    """Return the unbiased estimate of pass@k (Chen et al., arXiv 2107.03374, equation 1).

    That is the probability that k of `samples` answers, drawn without replacement, contain one of the `right` ones.
    Integer arithmetic keeps it exact for any size.
    """
    drawn = math.comb(samples, k)
    return (drawn - math.comb(samples - right, k)) / drawn


def _pass_at_powers(verdicts: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4, ...: the mean over the questions that have k samples, as long as there are any."""
    figures, k = {}, 1
    while counted := [pass_at(k, sum(one), len(one)) for one in verdicts if len(one) >= k]:
        figures[f"pass@{k}"] = fmean(counted)
        k *= 2
    return figures


def _played(attempts: Iterable[Attempt]) -> list[Trajectory]:
    return [attempt for attempt in attempts if isinstance(attempt, Trajectory)]
