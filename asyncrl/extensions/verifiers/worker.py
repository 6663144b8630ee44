"""Worker process: plays the episodes of one environment of verifiers. It runs in a virtual environment of its own and
imports nothing of asyncrl. Lines of JSON go both ways:

    -> {"env": {...}, "select": {...}, "most": 1000, "url": "http://..." or null}                the first line
    <- {"ready": {"agents": ["agent"], "tasks": [{"key", "name", "prompt"}, ...]}}, and the end without a url
    <- {"refused": {"field": "args.agent.sampling", "value": ..., "remedy": ...}}, and the end
    -> {"play": 7, "task": 3, "session": "KEY"}         <- {"played": 7, "ok": ..., "errors": [...], "traces": [...]}
    -> {"cancel": 7}                                    nothing is answered

Every model call of an episode has the header X-Session-ID, which is the id of its trace: KEY, or KEY.ROLE. The process
ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import BaseModel
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import BaseClientConfig
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

MOST_CHARACTERS, MOST_ERRORS = 2000, 5
KEY_VARIABLE = "ASYNCRL_PROXY_API_KEY"
"""verifiers hides variables with API_KEY in their names from the programs that it starts."""
OWN_HARNESS = "asyncrl-chat"
PAID_KEY = "PRIME_API_KEY"

WIRE = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # what environments print goes to stderr


def send(message: dict[str, Any]) -> None:
    """Write one line."""
    WIRE.write(json.dumps(message) + "\n")


class RefusedSetting(Exception):
    """Raised for a setting that cannot be trained with, or that costs money and was not named."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.told = {"field": field, "value": str(value), "remedy": remedy}
        super().__init__(remedy)


def configured(given: dict[str, Any]) -> Any:
    """Return the environment's configuration. Raises RefusedSetting.

    What a user does not name is never a paid service, nor a harness that runs code of the model.
    """
    named = {part for _, part in _parts("", given["env"]) if isinstance(part, str)}  # before defaults are filled in
    config = resolve_env_config(given["env"])
    agents = agent_config_fields(config).items()
    config = config.model_copy(update={name: _agent(name, one, config.taskset.id, named) for name, one in agents})
    for field, part in _parts("args", config):
        if isinstance(part, vf.RetryConfig) and (part.max_retries or part.rules):
            remedy = (
                "Remove it: asyncrl plays a failed episode again itself (rollout.retries), and counts what is lost."
            )
            raise RefusedSetting(field, part.model_dump(), remedy)
        if isinstance(part, BaseClientConfig) and part.api_key_var == PAID_KEY and PAID_KEY not in named:
            remedy = "This is prime's paid endpoint: set base_url and api_key_var, or name PRIME_API_KEY to pay for it."
            raise RefusedSetting(f"{field}.api_key_var", PAID_KEY, remedy)
        if isinstance(part, vf.PrimeConfig) and "prime" not in named:
            remedy = "This is prime's paid service: choose another type, or name prime to pay for it."
            raise RefusedSetting(f"{field}.type", "prime", remedy)
    return config


def _agent(name: str, agent: Any, taskset: str, named: set[str]) -> Any:
    if agent.sampling and (drawn := agent.sampling.model_dump(exclude_unset=True)):
        remedy = "Remove it: answers are drawn with rollout.temperature, since the trainer could not repeat another."
        raise RefusedSetting(f"args.{name}.sampling", drawn, remedy)
    changes: dict[str, Any] = {}
    if agent.runtime.type == "prime" and "prime" not in named:
        changes["runtime"] = vf.SubprocessConfig()
    if agent.harness is None and default_harness_id(taskset) == "bash":
        changes["harness"] = type(agent).model_validate({"harness": {"id": OWN_HARNESS}}).harness
    return agent.model_copy(update=changes)


def _parts(field: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a value and everything in it, with the field that holds it."""
    yield field, value
    values = dict(value) if isinstance(value, BaseModel) else value
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, inner in items:
        yield from _parts(f"{field}.{name}", inner)


def seen(trace: Any, role: str) -> dict[str, Any]:
    """Return what a trainer needs of a trace. It served the tokens, and has them already."""
    return {
        "role": role,
        "agent": trace.agent.name,
        "trainable": trace.agent.trainable,
        "ok": trace.ok,
        "reward": trace.reward,
        "rewards": {name: None if one is None else one.value for name, one in trace.rewards.items()},
        "metrics": trace.metrics,
        "stop": trace.stop_condition,
        "is_timeout": trace.is_timeout,
        "errors": errors_of(trace),
    }


def errors_of(part: Any) -> list[dict[str, Any]]:
    """Return the last errors of an episode or a trace."""
    return [
        {"type": error.type, "message": error.message[-MOST_CHARACTERS:], "status": error.status_code}
        for error in part.errors[-MOST_ERRORS:]
    ]


class HubPlayer:
    """Plays the episodes of one environment."""

    def __init__(self, env: Any, agents: list[str], tasks: list[Any], url: str) -> None:
        client = vf.EvalClientConfig(base_url=url, api_key_var=KEY_VARIABLE)
        self._context = vf.ModelContext(model="policy", client=client, sampling=vf.SamplingConfig())
        self._env, self._agents, self._tasks = env, agents, tasks
        self._playing: dict[int, asyncio.Task[None]] = {}

    def take(self, line: bytes) -> None:
        """Begin or cancel an episode."""
        asked = json.loads(line)
        if "cancel" in asked:
            if playing := self._playing.get(asked["cancel"]):
                playing.cancel()
            return
        number = asked["play"]
        playing = asyncio.create_task(self._play(number, self._tasks[asked["task"]], asked["session"]))
        self._playing[number] = playing
        playing.add_done_callback(lambda _: self._playing.pop(number, None))

    async def _play(self, number: int, task: Any, session: str) -> None:
        minted: Counter[str] = Counter()
        roles: dict[str, str] = {}

        def name(trace: Any) -> None:
            """Name a trace before it makes its first request. Each trace of an episode has a role of its own; the
            first one of a single agent has the empty one."""
            agent = trace.agent.name
            minted[agent] += 1
            role = agent if minted[agent] == 1 else f"{agent}-{minted[agent]}"
            role = "" if role == self._agents[0] and len(self._agents) == 1 else role
            trace.id = f"{session}.{role}" if role else session
            roles[trace.id] = role

        try:
            (slot,) = self._env.slots(task)
            episode = await self._env.run_slot(slot, self._context, on_trace=name)
            traces = [seen(trace, roles[trace.id]) for trace in episode.traces]
            send({"played": number, "ok": episode.ok, "errors": errors_of(episode), "traces": traces})
        except Exception as error:  # noqa: BLE001  an environment raises anything, and its episode must be answered
            raised = {"type": type(error).__name__, "message": str(error)[-MOST_CHARACTERS:], "status": None}
            send({"played": number, "ok": False, "errors": [raised], "traces": []})


async def main() -> None:
    """Load the environment, tell its tasks, and play until stdin ends."""
    lines = asyncio.StreamReader(limit=1 << 26)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    given = json.loads(await lines.readline())
    try:
        config = configured(given)
    except RefusedSetting as refused:
        send({"refused": refused.told})
        return
    env = load_environment(config)
    view = env.taskset.select(vf.SelectConfig.model_validate(given["select"]))
    tasks = list(view if view.bounded else view.take(given["most"]))
    agents = list(agent_config_fields(config))
    told = [{"key": one.key, "name": one.data.name, "prompt": one.data.prompt_text} for one in tasks]
    ready = {"ready": {"agents": agents, "tasks": told}}
    if given["url"] is None:
        send(ready)
        return
    async with env.serving():
        send(ready)
        player = HubPlayer(env, agents, tasks, given["url"])
        while line := await lines.readline():
            player.take(line)


if __name__ == "__main__":
    asyncio.run(main())
