"""An episode in an environment: its turns, its rewards, its end; and the environment is given back in any case."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from asyncrl.agents.linking import check
from asyncrl.agents.multi_turn import MultiTurn
from asyncrl.envs.env import EnvSpec, Step
from asyncrl.envs.pool import EnvironmentPool, PoolSettings
from asyncrl.errors import EpisodeFailed
from asyncrl.schema import Completion, Prompt, Trajectory
from tests.agents.talking import Talking, written
from tests.fakes import FakeTemplate

PROMPT = Prompt("p", [12, 1, 11], {"messages": [{"role": "user", "content": "1"}], "secret": "7", "state": "s0"}, "t")


class Guess:
    """Rewards the secret, and says how many guesses there were."""

    ended: ClassVar[list[int]] = []

    def __init__(self, *, hello: str = "") -> None:
        self._hello, self._count = hello, 0

    def reset(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        self._secret = question["secret"]
        return [{"role": "user", "content": self._hello}] if self._hello else []

    def step(self, action: str) -> Step:
        self._count += 1
        if action == "9":
            raise KeyError("no such guess")
        right = action == self._secret
        return Step(str(self._count), reward=float(right) - 0.125, done=right, state=f"s{self._count}")

    async def close(self) -> None:
        self.ended.append(self._count)


class Unfinished(Guess):
    """The task scores it, and it owes a reward where it ends early."""

    def step(self, action: str) -> Step:
        step = super().step(action)
        return Step(step.messages, step.reward, step.done, score=True)

    async def finish(self) -> float:
        return 0.5


def play(*answers: Completion, hello: str = "", kind: str = "Guess", **options: Any) -> tuple[Trajectory, Talking]:
    async def main() -> tuple[Trajectory, Talking]:
        generate = Talking(answers)
        spec = EnvSpec(f"{__name__}:{kind}", {"hello": hello})
        environments = EnvironmentPool("guess", spec, PoolSettings(hosted=False))
        found = await MultiTurn(environments, **options).run(PROMPT, generate)
        await environments.close()
        return found, generate

    Guess.ended.clear()
    return asyncio.run(main())


def test_turns_go_on_until_the_environment_is_done() -> None:
    found, generate = play(written(3, 10), written(7, 10))
    assert [(turn.observation, turn.reward, turn.state) for turn in found.turns] == [
        ([], -0.125, "s0"),
        ([1, 11], 0.875, "s1"),
    ]
    assert (found.reward, found.total) == (0.0, 0.75)  # its rewards are the environment's: the task is not asked
    check(found, PROMPT.token_ids, generate.asked)
    assert Guess.ended == [2]


def test_turns_end_at_their_limit_and_where_an_answer_is_cut_off() -> None:
    assert len(play(*[written(3, 10)] * 5, max_turns=3)[0].turns) == 3
    assert len(play(written(3, 10), written(3, finish="length"), written(3, 10))[0].turns) == 2


def test_what_a_reset_tells_is_read_behind_the_question() -> None:
    found, _ = play(written(7, 10), hello="4")
    assert [(turn.begins, turn.observation) for turn in found.turns] == [(True, [12, 1, 4, 11])]


def test_environment_that_raises_is_given_back() -> None:
    with pytest.raises(EpisodeFailed, match="environment_error: KeyError: 'no such guess'"):
        play(written(3, 10), written(9, 10))
    assert Guess.ended == [2]


def test_episode_left_to_the_task_has_only_its_turns_rewards() -> None:
    found, _ = play(written(3, 10), written(7, 10), kind="Unfinished")
    assert (found.reward, [turn.reward for turn in found.turns]) == (None, [-0.125, 0.875])


@pytest.mark.parametrize("early", ["turns", "tokens"])
def test_environment_is_asked_for_what_is_due_at_an_early_end(early: str) -> None:
    answers = [written(3, 10), written(3, 10, finish="length" if early == "tokens" else "stop")]
    found, _ = play(*answers, kind="Unfinished", max_turns=2 if early == "turns" else 9)
    assert [turn.reward for turn in found.turns] == [-0.125, 0.375]
    assert found.reward is None


def test_what_a_reset_tells_comes_with_the_tools_of_the_question() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown: list[Any] = []

    class Shows(FakeTemplate):
        def begin(self, messages: Any, tools: Any = ()) -> list[int]:
            shown.append(tools)
            return super().begin(messages)

    async def main() -> None:
        environments = EnvironmentPool(
            "guess", EnvSpec(f"{__name__}:Guess", {"hello": "4"}), PoolSettings(hosted=False)
        )
        prompt = Prompt("p", [12, 1, 11], {**PROMPT.question, "tools": tools}, "t")
        await MultiTurn(environments).run(prompt, Talking([written(7, 10)], Shows()))
        await environments.close()

    asyncio.run(main())
    assert shown == [tools]
