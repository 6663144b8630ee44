"""An environment of verifiers as a task: its tasks are the questions, and a worker process plays the episodes.

The worker asks the proxy for the model's answers, as any agent that uses the OpenAI API does. Every model call has the
id of its trace in a header, which names the episode and, if an episode has several traces, the role.

waits for     the worker (process.py), and engines through the proxy
on an error   EpisodeFailed with a reason of verdict.py, or the engine's error if an engine failed before
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.config import TaskConfig
from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.proxy.agents import ThroughTheProxy
from asyncrl.extensions.verifiers.extension import FIGURES
from asyncrl.extensions.verifiers.process import Launch, RestartedWorker
from asyncrl.extensions.verifiers.verdict import judged
from asyncrl.schema import Generate, Prompt, Trajectory
from asyncrl.tasks import Question, Task
from asyncrl.user_code import announce, check_arguments


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
    """Agent whose episodes a worker plays."""

    def __init__(self, how: Launch, keys: list[str]) -> None:
        super().__init__(how.tool_format, "127.0.0.1", 0)
        self._worker = RestartedWorker(how, keys)

    async def start(self) -> None:
        """Start the proxy and the worker. Raises ConfigError."""
        await super().start()
        await self._worker.running(self._proxy.base_url, self._proxy.secret)

    async def close(self) -> None:
        """End the worker, then the proxy."""
        await self._worker.close()
        await super().close()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode."""
        async with self._proxy.session(generate) as session:
            worker = await self._worker.running(self._proxy.base_url, self._proxy.secret)
            told = await worker.play(prompt.question["number"], session.name)
        verdict = judged(told)
        played = session.trajectory(prompt.token_ids, None, prompt.images, verdict.of_roles)
        trajectory = rewarded(played, verdict.of_roles)
        for kind, measured in (("reward/part", verdict.parts), ("episodes/metric", verdict.metrics)):
            for name, value in measured.items():
                FIGURES[f"{kind}/{name}"].append(value)
        return trajectory


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
