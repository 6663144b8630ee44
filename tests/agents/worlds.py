"""Environments for tests of agents, and a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from asyncrl.agents.linking import check
from asyncrl.envs.env import EnvSpec, Step
from asyncrl.envs.pool import EnvironmentPool, PoolSettings
from asyncrl.schema import Completion, Generate, Prompt, Template, Trajectory
from tests.agents.talking import Talking

PROMPT = Prompt("p", [12, 1, 11], {"messages": [{"role": "user", "content": "1"}], "state": "s0"}, "t")


class Sums:
    """Tells the sum of all that was said, and rewards it when it is over at `end`."""

    made: ClassVar[int] = 0
    open: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def __init__(
        self,
        *,
        end: int = 9,
        hello: str = "",
        moody: str = "",
        late: bool = False,
        scored: int | None = None,
        each: float = 0.0,
    ) -> None:
        """`each` turn is worth so much beside; `moody`: in its second life it tells another text, state or end; `late`:
        greets otherwise; `scored`: from this sum on the task scores it, in the place of rewards, and an eighth is due
        where it was not done."""
        Sums.made += 1
        self._end, self._hello, self._sum = end, hello, 0
        self._scored, self._each = scored, each
        self._moody, self._late = moody if Sums.made > 1 else "", late and Sums.made > 1

    async def reset(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        Sums.open += 1
        Sums.most = max(Sums.most, Sums.open)
        hello = "3" if self._late else self._hello
        return [{"role": "user", "content": hello}] if hello else []

    async def step(self, action: str) -> Step:
        await asyncio.sleep(0)
        self._sum += int(action)
        done = self._sum >= self._end or self._moody == "end"
        score = self._scored is not None and self._sum >= self._scored
        reward = self._sum / 8 if done and not score else 0.0
        text = str(self._sum + (self._moody == "text"))
        return Step(text, reward + self._each, done, score, state=f"{self._moody == 'state' or 's'}{self._sum}")

    async def finish(self) -> float:
        return 0.125 * (self._scored is not None)

    async def close(self) -> None:
        Sums.open -= 1


def play(
    make: Callable[[EnvironmentPool], Any],
    answers: Iterable[Completion] | Generate,
    *,
    prompt: Prompt = PROMPT,
    concurrency: int | None = None,
    template: Template | None = None,
    **world: Any,
) -> tuple[Trajectory, Any]:
    """An episode of an agent among Sums, checked as rollout does it; environments are all given back."""

    async def main() -> tuple[Trajectory, Any]:
        generate: Any = answers if callable(answers) else Talking(answers, template)
        settings = PoolSettings(hosted=False, concurrency=concurrency)
        environments = EnvironmentPool("sums", EnvSpec(f"{__name__}:Sums", world), settings)
        try:
            async with asyncio.timeout(60):
                return await make(environments).run(prompt, generate), generate
        finally:
            await environments.close()
            assert Sums.open == 0

    Sums.made = Sums.open = Sums.most = 0
    found, generate = asyncio.run(main())
    check(found, prompt.token_ids, generate.asked)
    return found, generate
