"""Program of mode=evaluate: python -m asyncrl.extensions.evaluate.program RUN_DIR, in place of the rollout process.

It asks every question once, appends what came of it to answers.jsonl, and writes results.json and summary.json at the
end. A resumed run asks only what has no answer yet; a question with a failed attempt is asked again.
"""

from __future__ import annotations

from asyncrl import import_hooks  # noqa: F401  # first: see there

# isort: split
import asyncio
import hashlib
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from asyncrl import jsonl
from asyncrl.engine.fleet import build_fleet
from asyncrl.engine.update import Update
from asyncrl.errors import AsyncRLError
from asyncrl.extensions.evaluate.extension import ANSWERS, RESULTS, asked
from asyncrl.extensions.evaluate.figures import Figure, figures, final_answer
from asyncrl.jsonl import Tail
from asyncrl.network.addresses import STOP, STOPPED
from asyncrl.progress import failing
from asyncrl.rollout.__main__ import main
from asyncrl.rollout.build import RolloutParts
from asyncrl.rollout.evaluation import Attempt
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.schema import Prompt, Trajectory

RECONCILE_SECONDS = 2.0
KEY = ("set", "index", "question")
"""Fields that tell the answers to a question from others: a set may hold the same one several times."""


class Evaluator:
    """The questions of a run and their answers."""

    def __init__(self, parts: RolloutParts) -> None:
        self._parts, self._run = parts, parts.run
        config = parts.run.config
        names = config.eval.sets or config.mixture
        self.sets = {name: prompts for name, prompts in parts.evaluations.sets.items() if name in names}
        self._file = parts.run.run_dir / ANSWERS
        self._answered = self._read()

    def _read(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        """Return what an earlier process wrote, and write it anew without what is not complete."""
        _, *records = Tail(self._file)() or [{}]
        known = {tuple(one[name] for name in KEY): one for one in records if not failed(one)}
        lines = [{"settings": asked(self._run.config)}, *known.values()]
        jsonl.replace_text(self._file, "".join(json.dumps(line) + "\n" for line in lines))
        return known

    async def ask_all(self) -> bool:
        """Ask every question that has no answer. Return whether all have one now: a run that is asked to stop ends with
        those that it has."""
        stop, server = self._run.run_dir / STOP, self._parts.server
        running = {
            asyncio.create_task(self._ask(name, prompt))
            for name, prompts in self.sets.items()
            for prompt in prompts
            if key(name, prompt) not in self._answered
        }
        while running and not stop.exists():
            server.starting = f"the answers to {len(running)} questions"
            done, running = await asyncio.wait(running, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        for task in running:
            task.cancel()
        return not running

    async def _ask(self, name: str, prompt: Prompt) -> None:
        greedy, *samples = [self._told(name, one) for one in await self._parts.evaluations.ask(prompt)]
        own = key(name, prompt)
        self._answered[own] = record = {**dict(zip(KEY, own, strict=True)), "greedy": greedy, "samples": samples}
        jsonl.append(self._file, record)

    def _told(self, name: str, attempt: Attempt) -> dict[str, Any]:
        """Return what is kept of an attempt at a question of this set."""
        if not isinstance(attempt, Trajectory):
            return {"failed": str(attempt)}
        last = attempt.turns[-1].completion
        return {
            "reward": attempt.total,
            "correct": self._parts.evaluations.tasks[name].correct(attempt.total),
            "tokens": attempt.num_tokens,
            "truncated": last.finish_reason == "length",
            "answer": final_answer(self._parts.model.template.decode(last.token_ids)),
        }

    def results(self) -> dict[str, Any]:
        """Return the content of results.json. Raises AsyncRLError for a set without any answer."""
        found = {}
        for name, prompts in self.sets.items():
            questions = [self._answered[key(name, prompt)] for prompt in prompts]
            shown = {figure: asdict(value) for figure, value in figures(questions).items()}
            failures = [one for question in questions for one in failed(question)]
            if not shown:
                last = failures[-1] if failures else "it has none"
                raise AsyncRLError(f"evaluation: no question of {name} could be answered; the last: {last}")
            found[name] = {"figures": shown, "failed": len(failures), "questions": questions}
        return {"settings": asked(self._run.config), "sets": found}

    def finish(self) -> None:
        """Write the results, a line of eval.jsonl for each set, and the summary."""
        results = self.results()
        summary: dict[str, Any] = {"reason": "every question was asked"}
        for name, one in results["sets"].items():
            self._parts.reporter.evaluated([_line(name, one)])
            for figure, value in one["figures"].items():
                summary[f"{name}/{figure}"] = str(Figure(**value))
            summary |= {f"{name}/failed": one["failed"]} if one["failed"] else {}
        jsonl.replace(self._run.run_dir / RESULTS, results)
        jsonl.replace(self._run.run_dir / "summary.json", summary)


def key(name: str, prompt: Prompt) -> tuple[str, int, str]:
    """Return what answers to a question of this set are kept by: whatever the model, a hash of messages and images."""
    hashed = hashlib.sha256(msgspec.json.encode(prompt.question.get("messages", prompt.index)))
    for image in prompt.images:
        hashed.update(image)
    return name, prompt.index, hashed.hexdigest()[:16]


def failed(question: dict[str, Any]) -> list[str]:
    """Return the errors of a question's attempts."""
    return [one["failed"] for one in (question["greedy"], *question["samples"]) if "failed" in one]


def _line(name: str, one: dict[str, Any]) -> dict[str, Any]:
    """Return a set's line of eval.jsonl, as an evaluation within a run writes it."""
    means = {figure: value["value"] for figure, value in one["figures"].items()}
    return {
        "set": name,
        "version_min": 0,
        "version_max": 0,
        "skipped": 0,
        "questions": len(one["questions"]),
        "failed": one["failed"],
        "accuracy": means.get("accuracy", means.get("mean")),
        "reward/mean": means.get("reward", means.get("reward/mean")),
        **{figure: value for figure, value in means.items() if figure.startswith("pass@")},
    }


async def follow(run: RolloutRun) -> None:
    """Let engines that are started again serve: they hold the model's weights, which nobody changes."""
    fleet = build_fleet(run.config, run.addresses, run.run_dir, decides=True)
    update = Update(fleet, mode=run.config.weights.pause_mode)

    def renew() -> None:
        fleet.reconcile()
        if fleet.joining:
            with update.paused():
                update.label(0)

    try:
        while True:
            await asyncio.to_thread(renew)
            await asyncio.sleep(RECONCILE_SECONDS)
    finally:
        fleet.close()


async def evaluate(parts: RolloutParts) -> None:
    """Ask all questions, write what came of them, and end this process."""
    async with asyncio.TaskGroup() as working:
        evaluator = Evaluator(parts)
        await parts.begin(working)
        following = working.create_task(follow(parts.run))
        if await evaluator.ask_all():
            evaluator.finish()
        else:
            (parts.run.run_dir / STOP).rename(parts.run.run_dir / STOPPED)
        following.cancel()
        signal.raise_signal(signal.SIGTERM)  # as the launcher ends this process: the server closes, then the parts


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher ends them in order
    folder = Path(sys.argv[1])
    with failing(folder, "rollout"):
        asyncio.run(main(folder, evaluate))
    sys.exit(0 if (folder / "summary.json").exists() or (folder / STOPPED).exists() else 1)
