"""An environment of verifiers as a task: its tasks are the questions, and a worker process plays the episodes.

The worker asks the proxy for the model's answers, as any agent that uses the OpenAI API does. Every model call has the
id of its trace in a header, which names the episode and, if an episode has several traces, the role.

verifiers itself scores several failures: a stage that runs out of time is "a stop, not a failure", a reward that is
missing counts as 0, and one that is not a number is kept. Here a reward is accepted only if the episode is ok, no stage
but the agent's own ran out of time, and every reward is present and finite.

waits for     the worker (process.py), and engines through the proxy
on an error   EpisodeFailed with a reason of its own, or the engine's error if an engine failed before
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from asyncrl.config import TaskConfig
from asyncrl.errors import AsyncRLError, ConfigError, EpisodeFailed
from asyncrl.extensions.proxy.agents import ThroughTheProxy
from asyncrl.extensions.verifiers.extension import FIGURES
from asyncrl.extensions.verifiers.process import HubWorker, Launch
from asyncrl.schema import Generate, Prompt, Trajectory
from asyncrl.tasks import Question, Task
from asyncrl.user_code import announce, check_arguments

REASONS = {
    "SandboxError": "sandbox",
    "TunnelError": "sandbox",
    "ToolsetError": "tool",
    "InterceptionError": "hub",
    "TimeoutError": "environment_timeout",
}
"""Reasons in the ledger by the class of error that verifiers tells; others are the environment's. All are retried."""
TRANSPORT = ("ConnectError", "ReadError", "WriteError", "RemoteProtocolError", "ConnectTimeout", "APIConnectionError")
"""Errors of connections between parts of verifiers, by which a harness that is innocent fails."""
OWN_TIMEOUT = "agent_timeout"


class Verifiers(Task):
    """Task of one environment. `task.name` is its module, and the parameters are the fields of Launch (process.py)."""

    def __init__(self, config: TaskConfig) -> None:
        check_arguments(Launch, config.params, "task.params", "task.kind=verifiers", config.name)
        how = Launch(config.name, **config.params)
        told = how.tasks()
        self.section = config
        self.keys: list[str] = [task["key"] for task in told["tasks"]]
        """SHA-256 of each task."""
        self._tasks: list[dict[str, Any]] = told["tasks"]
        self.agent = EpisodesElsewhere(how, self.keys)
        """Plays the episodes."""
        announce(self)

    def question(self, index: int) -> Question:
        """Return the first message of a task, its number and its key. The harness may add to it."""
        number = index % len(self._tasks)
        task = self._tasks[number]
        text = task["prompt"] or task["name"] or str(number)
        return {"messages": [{"role": "user", "content": text}], "number": number, "key": task["key"]}

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self._tasks)


class EpisodesElsewhere(ThroughTheProxy):
    """Agent whose episodes a worker plays, which is started again when it has died."""

    def __init__(self, how: Launch, keys: list[str]) -> None:
        super().__init__(how.tool_format, "127.0.0.1", 0)
        self._how, self._keys = how, keys
        self._starting = asyncio.Lock()
        self._worker: HubWorker | None = None

    async def start(self) -> None:
        """Start the proxy and the worker. Raises ConfigError."""
        await super().start()
        await self._living()

    async def close(self) -> None:
        """End the worker, then the proxy."""
        if self._worker:
            await self._worker.close()
        await super().close()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode."""
        async with self._proxy.session(generate) as session:
            worker = await self._living()
            told = await worker.play(prompt.question["number"], session.name)
        verdict = judged(told)
        played = session.trajectory(prompt.token_ids, None, prompt.images, verdict.of_roles)
        trajectory = rewarded(played, verdict.of_roles)
        for kind, measured in (("reward/part", verdict.parts), ("episodes/metric", verdict.metrics)):
            for name, value in measured.items():
                FIGURES[f"{kind}/{name}"].append(value)
        return trajectory

    async def _living(self) -> HubWorker:
        """Return the worker, after starting it if there is none that lives. Raises EpisodeFailed if one that had worked
        cannot be started again, and ConfigError for the first."""
        async with self._starting:
            if not (self._worker and self._worker.alive):
                try:
                    worker, told = await HubWorker.start(self._how, self._proxy.base_url, self._proxy.secret)
                    if [task["key"] for task in told["tasks"]] != self._keys:
                        await worker.close()
                        remedy = "Its tasks are others each time that it is loaded: give its taskset a seed."
                        raise ConfigError("task.name", self._how.env, remedy)
                    self._worker = worker
                except (AsyncRLError, OSError) as error:
                    if not self._worker:
                        raise
                    raise EpisodeFailed("environment_died", f"its worker cannot be started again: {error}") from error
            return self._worker


def rewarded(played: Trajectory, of_roles: Mapping[str, float]) -> Trajectory:
    """Return the trajectory with its reward: that of a single trace is the episode's, of several each its own, which
    its role's last turn gets."""
    lasts = {turn.role: place for place, turn in enumerate(played.turns)}
    if silent := sorted(of_roles.keys() - lasts.keys()):
        raise EpisodeFailed("agent_error", f"{silent[0] or 'the agent'} made no request to the model")
    if set(of_roles) == {""}:
        return Trajectory(played.turns, of_roles[""])
    turns = list(played.turns)
    for role, reward in of_roles.items():
        turns[lasts[role]] = msgspec.structs.replace(turns[lasts[role]], reward=reward)
    return Trajectory(turns, 0.0)


@dataclass(frozen=True)
class Verdict:
    """The rewards of an episode that was accepted."""

    of_roles: Mapping[str, float]
    """Reward of each trace that is trained, by its role."""
    parts: Mapping[str, float]
    """What the rewards were made of, by name; several traces are averaged."""
    metrics: Mapping[str, float]
    """What the environment measured besides."""


def judged(told: Mapping[str, Any]) -> Verdict:
    """Return the rewards of an episode that a worker tells of. Raises EpisodeFailed."""
    traces = told["traces"]
    for trace in traces:
        own = trace["stop"] == OWN_TIMEOUT and trace["trainable"]
        if trace["is_timeout"] and not own:
            raise EpisodeFailed("environment_timeout", f"{trace['agent']} ended with {trace['stop']}")
    if not told["ok"]:
        raise _failed(told)
    for trace in traces:
        for name, reward in {**trace["rewards"], "in all": trace["reward"]}.items():
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise EpisodeFailed("environment_garbage", f"reward {name} of {trace['agent']} is {reward}")
    trained = [trace for trace in traces if trace["trainable"]]
    if unrewarded := [trace["agent"] for trace in trained if not trace["rewards"]]:
        raise EpisodeFailed("environment_garbage", f"{unrewarded[0]} has no reward")
    if not trained:
        raise EpisodeFailed("environment_garbage", "no trace of the episode is trained")
    of_roles = {trace["role"]: float(trace["reward"]) for trace in trained}
    return Verdict(of_roles, _means(trained, "rewards"), _means(trained, "metrics"))


def _failed(told: Mapping[str, Any]) -> EpisodeFailed:
    """Return what an episode that is not ok failed of: the last error of a trace, or else its own."""
    failed = [trace for trace in told["traces"] if not trace["ok"]]
    errors = [error for part in (told, *failed) for error in part["errors"]]
    if not errors:
        return EpisodeFailed("environment_error", "the episode is not ok, and tells no error")
    kind, message, status = errors[-1]["type"], errors[-1]["message"], errors[-1]["status"]
    detail = f"{kind}: {message}"
    if kind == "ProviderError":  # an engine that failed ends the session before: what is left are refusals
        refused = status is not None and 400 <= status < 500
        return EpisodeFailed("agent_error" if refused else "hub", detail, retry=not refused)
    if kind == "HarnessError":
        broken = any(name in message for name in TRANSPORT)
        return EpisodeFailed("hub" if broken else "agent_error", detail, retry=broken)
    return EpisodeFailed(REASONS.get(kind, "environment_error"), detail)


def _means(traces: list[Any], field: str) -> dict[str, float]:
    """Return the mean of each number over the traces that have it."""
    found: dict[str, list[float]] = {}
    for name, value in (item for trace in traces for item in trace[field].items()):
        if isinstance(value, int | float) and math.isfinite(value):
            found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
