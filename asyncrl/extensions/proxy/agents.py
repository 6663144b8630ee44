"""Agents that use only the OpenAI API, trained through the proxy (asyncrl/extensions/proxy).

    agent=asyncrl.extensions.proxy.agents:Proxied agent_params.agent=my_module:solve
        async def solve(question, base_url, api_key) -> float | None

    agent=asyncrl.extensions.proxy.agents:Command 'agent_params.argv=[python, my_agent.py]'
        any program, which finds its endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, or in ANTHROPIC_BASE_URL and
        ANTHROPIC_API_KEY, and its question on stdin

The reward is the function's return value, the one in the program's last line (reads_reward), or the one posted to
/v1/reward; without any of these, the task scores the episode.

waits for     the function or the program, which is cancelled or killed when the episode ends or reaches a deadline
on an error   EpisodeFailed("agent_error") with the end of its stderr when a program fails, or the engine's error if an
              engine failed before
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.proxy import programs
from asyncrl.extensions.proxy.server import Proxy
from asyncrl.extensions.proxy.session import ProxySession
from asyncrl.images import data_url, without_images
from asyncrl.schema import Generate, Prompt, Trajectory
from asyncrl.user_code import check_arguments, load

OWN = "ASYNCRL_"
RUN_ID = "ASYNCRL_RUN_ID"


class ThroughTheProxy:
    """Base class of agents behind the proxy. Its server runs from the first episode on."""

    def __init__(self, tool_format: str, host: str, port: int, reasoning: bool = False) -> None:
        self._proxy = Proxy(host=host, port=port, tool_format=tool_format, reasoning=reasoning)

    def figures(self) -> dict[str, int]:
        """Return counts of requests. More than one of `proxy/contexts_begun` per episode means extra samples from
        edited histories."""
        return {f"proxy/{name}": count for name, count in asdict(self._proxy.figures).items()}

    async def start(self) -> None:
        """Start the server now rather than in the first episode. Raises ConfigError when the address is taken."""
        self._proxy.start()

    async def close(self) -> None:
        """Stop the server and cancel its open requests."""
        await self._proxy.close()

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode."""
        async with self._proxy.session(generate) as session:
            reward = await self._play(prompt, session)
        reward = session.posted if reward is None else reward
        return session.trajectory(prompt.token_ids, reward, prompt.images)

    async def _play(self, prompt: Prompt, session: ProxySession) -> float | None:
        raise NotImplementedError


class Proxied(ThroughTheProxy):
    """Agent that calls a user's async function. It runs in this process's event loop and must not block it."""

    def __init__(
        self,
        agent: str,
        *,
        params: Mapping[str, Any] | None = None,
        tool_format: str = "hermes",
        reasoning: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Load the function. Raises ConfigError.

        agent: import path, module:name, of an async function of (question, base_url, api_key) and `params`
        """
        super().__init__(tool_format, host, port, reasoning)
        self._solve, self._params = load(agent, "agent_params.agent"), dict(params or {})
        if not inspect.iscoroutinefunction(self._solve):
            remedy = "Must be an async function of (question, base_url, api_key); use Command for code that blocks."
            raise ConfigError("agent_params.agent", agent, remedy)
        check_arguments(self._solve, self._params, "agent_params.params", agent, question={}, base_url="", api_key="")

    async def _play(self, prompt: Prompt, session: ProxySession) -> float | None:
        question = copy.deepcopy(_question(prompt))  # siblings share it, and functions append to its messages
        reward = await self._solve(
            question=question, base_url=self._proxy.base_url, api_key=session.key, **self._params
        )
        return None if reward is None else float(reward)


class Command(ThroughTheProxy):
    """Agent that runs a program per episode, in its own process group, which is killed when the episode ends."""

    runs_programs = True
    """Tells the limit on concurrent episodes to look at this machine's load and memory."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        reads_reward: bool = False,
        tool_format: str = "hermes",
        reasoning: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Check the command. Raises ConfigError.

        env: added to this process's environment, from which asyncrl's own variables are removed; PATH begins with the
            folder of this process's python
        reads_reward: read the reward from the last line of the program's stdout, which must be {"reward": x}
        """
        super().__init__(tool_format, host, port, reasoning)
        if isinstance(argv, str) or not argv:
            raise ConfigError("agent_params.argv", argv, "Must be a list: the program, then its arguments.")
        if cwd is not None and not Path(cwd).expanduser().is_dir():
            raise ConfigError("agent_params.cwd", cwd, "Must be a folder.")
        self._argv, self._env = [str(word) for word in argv], dict(env or {})
        self._cwd = Path(cwd).expanduser() if cwd else None
        self._host, self._reads_reward = host, reads_reward

    async def _play(self, prompt: Prompt, session: ProxySession) -> float | None:
        ended = await programs.run(
            self._argv, stdin=json.dumps(_question(prompt)).encode(), env=self._environment(session.key), cwd=self._cwd
        )
        if ended.status:
            raise EpisodeFailed("agent_error", f"{self._argv[0]} {ended.reason}: {ended.last_lines()}")
        return _reward(ended.stdout) if self._reads_reward else None

    def _environment(self, key: str) -> dict[str, str]:
        """Return the program's environment.

        It contains the run's id, by which the launcher finds leftover processes, but no secrets of the run.
        """
        found = {name: value for name, value in os.environ.items() if not name.startswith(OWN) or name == RUN_ID}
        found |= programs.reaching(self._host, Path(sys.executable))
        url = self._proxy.base_url
        found |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        found |= {"ANTHROPIC_BASE_URL": url.removesuffix("/v1"), "ANTHROPIC_API_KEY": key}
        return found | self._env


def _question(prompt: Prompt) -> dict[str, Any]:
    """Return the question with its images as data URLs, which programs can send to the proxy."""
    urls = map(data_url, prompt.images)

    def shown(part: Any) -> Any:
        image = part == {"type": "image"}
        return {"type": "image_url", "image_url": {"url": next(urls)}} if image else part

    messages = [
        {**message, "content": [shown(part) for part in message["content"]]}
        if isinstance(message.get("content"), list | tuple)
        else message
        for message in without_images(prompt.question["messages"])
    ]
    return {**prompt.question, "messages": messages}


def _reward(stdout: bytes) -> float:
    """Return the reward in the last line of the output. Raises EpisodeFailed when there is none."""
    line = stdout.strip().rpartition(b"\n")[2]
    try:
        reward = float(json.loads(line)["reward"])
    except (ValueError, TypeError, KeyError, RecursionError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EpisodeFailed("agent_error", f'its last line is no {{"reward": x}}: {line[-200:]!r}')
    return reward
