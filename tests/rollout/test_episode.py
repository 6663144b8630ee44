"""Whoever hangs or raises costs its group, with a reason; neither the loop nor the run waits for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy
import pytest
import torch

from asyncrl.agents.single_turn import SingleTurn
from asyncrl.errors import AsyncRLError, EpisodeFailed
from asyncrl.rewards import reward as rewards
from asyncrl.rewards.reward import RewardInput, Score, Scorer
from asyncrl.rollout.agent import FunctionAgent
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.rollout.reporters import PER_MINUTE, FailureReporter
from asyncrl.rollout.serving import contain
from asyncrl.schema import Generate, Prompt, Trajectory, Turn
from tests.fakes import FakeClient, FakeTemplate, completion, jumping, until

PROMPT = Prompt("p0", [12, 1, 11], {}, "length")
Script = Callable[[Generate], Coroutine[Any, Any, None]]


class Scripted:
    """Asks once, does what the script says, and asks once more."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        first = await generate(prompt.token_ids)
        await self.script(generate)
        second = await generate([*prompt.token_ids, *first.token_ids, 1])
        return Trajectory([Turn([], first), Turn([1], second)])


async def one(trajectory: Trajectory) -> Trajectory:
    return Trajectory(trajectory.turns, 1.0)


def played(
    script: Script, score: Callable[[Trajectory], Coroutine[Any, Any, Trajectory]] = one, **limits: float
) -> tuple[Trajectory, Any]:
    """The trajectory, and the session."""

    async def main() -> tuple[Trajectory, Any]:
        contain(asyncio.get_running_loop())
        client = FakeClient(lambda _: completion(), delay=0.05)
        session = client.generate()
        options: dict[str, Any] = {"agent": 60.0, "reward": 60.0, "episode": None} | limits
        async with asyncio.timeout(1000):
            episode = Episode(session, EpisodeTimeouts(**options), FakeTemplate())
            return await episode.play(Scripted(script), PROMPT, score), session

    return jumping(main())


async def at_once(_: Generate) -> None:
    return None


async def for_ever(_: Generate) -> None:
    await asyncio.Event().wait()


def test_agent_that_goes_silent_is_given_up_by_its_limit() -> None:
    with pytest.raises(EpisodeFailed, match=r"agent_timeout: .* \(rollout.agent_timeout\)") as caught:
        played(for_ever, agent=0.05)
    assert caught.value.reason == "agent_timeout"


def test_time_that_engines_take_is_not_the_agents() -> None:
    async def ask_on(generate: Generate) -> None:
        await asyncio.gather(*(generate([1]) for _ in range(3)))

    found, session = played(ask_on, agent=0.04)  # each answer takes 0.05 s
    assert found.reward == 1.0
    assert session.activity.waits_for == ""


def test_time_of_all_its_parts_is_the_episodes() -> None:
    with pytest.raises(EpisodeFailed, match="episode_timeout"):
        played(at_once, episode=0.08)

    async def slow(_: Trajectory) -> float:
        await asyncio.sleep(60)
        return 0.0

    with pytest.raises(EpisodeFailed, match="episode_timeout"):
        played(at_once, slow, episode=0.15)


def test_agents_own_timeout_is_its_error() -> None:
    async def times_out(_: Generate) -> None:
        raise TimeoutError("the environment")

    with pytest.raises(EpisodeFailed, match="agent_error: TimeoutError: the environment"):
        played(times_out)


@pytest.mark.parametrize("in_a_task", [False, True])
def test_agent_that_exits_costs_its_group_alone(in_a_task: bool) -> None:
    """Also in a task of its own, where SystemExit would end the event loop."""

    async def exits() -> None:
        sys.exit("enough")

    async def script(_: Generate) -> None:
        asyncio.get_running_loop().call_later(60, print)
        await (asyncio.ensure_future(exits()) if in_a_task else exits())

    with pytest.raises(EpisodeFailed, match=r"agent_error: .*SystemExit: enough"):
        played(script)


class Numpy:
    """An agent that computes its rewards with numpy."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        asked = await generate(prompt.token_ids)
        of_tokens = list(numpy.zeros(len(asked.token_ids), dtype=numpy.float32))
        return Trajectory([Turn([], asked, numpy.float32(0.25), of_tokens)], numpy.float64(1.0))


def test_rewards_of_an_agents_own_arithmetic_are_plain_numbers() -> None:
    async def main() -> Trajectory:
        episode = Episode(
            FakeClient(lambda _: completion()).generate(),
            EpisodeTimeouts(agent=60.0, reward=60.0, episode=None),
            FakeTemplate(),
        )
        return await episode.play(Numpy(), PROMPT, one)

    found = asyncio.run(main())
    assert (found.reward, found.turns[0].reward) == (1.0, 0.25)
    assert {type(one) for one in (found.reward, found.turns[0].reward, *found.turns[0].token_rewards)} == {float}


REFUSED = {
    "ids of numpy": {"token_ids": numpy.arange(3)},
    "ids that are numbers of numpy": {"token_ids": list(numpy.arange(3))},
    "ids of torch": {"token_ids": torch.arange(3)},
    "truth": {"token_ids": [True]},
    "fractions": {"token_ids": [1.0]},
    "a text": {"token_ids": "1 2 3"},
    "nothing": {"token_ids": []},
    "a fraction of a token": {"max_new_tokens": 1.5},
    "a role without a name": {"role": 5},
    "a text as list of texts": {"stop": "</answer>"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_request_is_the_agents_error_where_it_makes_it(name: str) -> None:
    async def script(generate: Generate) -> None:
        await generate(**{"token_ids": [1]} | REFUSED[name])

    (field,) = REFUSED[name]
    with pytest.raises(EpisodeFailed, match=rf"agent_error: ValidationError: .*\$\.{field}") as caught:
        played(script)
    assert "script" in caught.value.where


async def appends_to_the_answer(prompt: Prompt, generate: Generate) -> float:
    answer = await generate(prompt.token_ids)
    context = answer.token_ids
    context += [1]
    return 1.0


async def appends_to_the_prompt(prompt: Prompt, generate: Generate) -> float:
    context = prompt.token_ids
    context += (await generate(context)).token_ids
    prompt.question["messages"].append({"role": "assistant", "content": "1"})
    prompt.question.pop("secret")
    await generate([*context, 1])
    return 1.0


def of_function(agent: Callable[[Prompt, Generate], Coroutine[Any, Any, float]], prompt: Prompt) -> Trajectory:
    async def main() -> Trajectory:
        session = FakeClient(lambda _: completion()).generate()
        episode = Episode(session, EpisodeTimeouts(60.0, 60.0, None), FakeTemplate())
        return await episode.play(FunctionAgent(agent, {}), prompt, one)

    return asyncio.run(main())


async def asks_in_a_loop_of_its_own(prompt: Prompt, generate: Generate) -> float:
    await asyncio.to_thread(lambda: asyncio.run(generate(prompt.token_ids)))  # type: ignore[arg-type]
    return 1.0


async def asks_from_a_thread(prompt: Prompt, generate: Generate) -> float:
    loop = asyncio.get_running_loop()

    def ask() -> None:
        asyncio.run_coroutine_threadsafe(generate(prompt.token_ids), loop).result()  # type: ignore[arg-type]

    await asyncio.to_thread(ask)
    return 1.0


def test_agent_asks_from_threads_in_its_own_loop_alone() -> None:
    assert of_function(asks_from_a_thread, PROMPT).reward == 1.0
    with pytest.raises(EpisodeFailed, match=r"agent_error: RuntimeError: .*run_coroutine_threadsafe"):
        of_function(asks_in_a_loop_of_its_own, PROMPT)


def test_agent_that_changes_an_answer_is_told() -> None:
    with pytest.raises(EpisodeFailed, match=r"agent_error: .*the agent changed the list of tokens of an answer"):
        of_function(appends_to_the_answer, PROMPT)


def test_agent_may_change_its_prompt_but_not_its_siblings() -> None:
    question = {"messages": [{"role": "user", "content": "?"}], "secret": 7}
    prompt = msgspec.structs.replace(PROMPT, question=question)
    for _ in range(2):
        turns = of_function(appends_to_the_prompt, prompt).turns
        assert [(turn.observation, turn.begins) for turn in turns] == [([], False), ([1], False)]
    assert prompt.token_ids == [12, 1, 11]
    assert question == {"messages": [{"role": "user", "content": "?"}], "secret": 7}


def test_request_that_the_agent_left_under_way_may_end_later() -> None:
    async def main() -> None:
        left: list[asyncio.Future[Any]] = []

        async def leave(generate: Generate) -> None:
            left.append(asyncio.ensure_future(generate([1])))
            raise ValueError("a typo")

        session = FakeClient(delay=0.02).generate()
        with pytest.raises(EpisodeFailed, match="agent_error"):
            await Episode(session, EpisodeTimeouts(60.0, 60.0, None), FakeTemplate()).play(Scripted(leave), PROMPT, one)
        assert (await left[0]).token_ids == [0, 1]

    asyncio.run(main())


def test_session_says_whom_its_episode_waits_for() -> None:
    seen: list[str] = []

    async def look(generate: Generate) -> None:
        seen.append(generate._session.activity.waits_for)  # type: ignore[attr-defined]

    async def main() -> None:
        session = FakeClient().generate()

        async def score(trajectory: Trajectory) -> Trajectory:
            seen.append(session.activity.waits_for)
            return await one(trajectory)

        await Episode(session, EpisodeTimeouts(60.0, 60.0, None), FakeTemplate()).play(Scripted(look), PROMPT, score)
        seen.append(session.activity.waits_for)

    asyncio.run(main())
    assert seen == ["its agent", "its reward", ""]


# --- rewards --------------------------------------------------------------------------------------------------


class Judge:
    """A reward function of the user's."""

    pure = False

    def __init__(self, score: Callable[[], Any], *, inline: bool = False) -> None:
        self._score, self.inline = score, inline

    def __call__(self, answer: RewardInput) -> Any:
        return self._score()


ANSWER = RewardInput("", [""], {}, Trajectory([]))


def scored(score: Callable[[], Any], *, timeout: float = 60.0, inline: bool = False) -> float:
    return asyncio.run(Scorer(timeout).score(Judge(score, inline=inline), ANSWER)).reward


def test_quick_score_runs_in_the_loop_and_any_other_beside_it() -> None:
    names: list[str] = []

    def note() -> float:
        names.append(threading.current_thread().name)
        return 0.5

    assert [scored(note, inline=True), scored(note)] == [0.5, 0.5]
    assert names == ["MainThread", "reward"]


def test_slow_score_does_not_stop_the_loop() -> None:
    async def main() -> int:
        release, turns = threading.Event(), 0
        scoring_ = asyncio.ensure_future(Scorer(60.0).score(Judge(lambda: release.wait(60)), ANSWER))
        while turns < 20:
            await asyncio.sleep(0.001)
            turns += 1
        release.set()
        assert (await scoring_).reward == 1.0
        return turns

    assert asyncio.run(main()) == 20


def raising(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda: {}["missing"], "reward_error: KeyError: 'missing'"),
        (lambda: float("nan"), "reward_error: the reward is nan: it must be a finite number"),
        (lambda: "1.0", "reward_error: the reward is '1.0': it must be a finite number"),
        (lambda: None, "reward_error: the reward is None: it must be a finite number"),
        (lambda: numpy.ones(2), "reward_error: the reward is array([1., 1.]): it must be a finite number"),
        (
            lambda: Score(1.0, parts={"a": ""}),
            "reward_error: part a of the reward is '': it must be a finite number",
        ),
        (lambda: Score(1.0, [None]), "reward_error: the reward of a turn is None: it must be a finite number"),
        (lambda: sys.exit("no"), "reward_error: SystemExit: no"),
        (lambda: raising(KeyboardInterrupt()), "reward_error: KeyboardInterrupt: "),
        (lambda: raising(asyncio.CancelledError()), "reward_error: CancelledError: "),
    ],
)
def test_what_a_reward_raises_is_a_failed_episode(fault: Callable[[], Any], text: str, inline: bool) -> None:
    with pytest.raises(EpisodeFailed) as caught:
        scored(fault, inline=inline)
    assert f"{caught.value.reason}: {caught.value.detail}" == text
    assert not caught.value.where or caught.value.where.startswith(f"{__file__}:")


def test_thread_ending_as_a_generator_fails_its_episode() -> None:
    """In the event loop GeneratorExit closes a coroutine, and is none of the reward's."""
    with pytest.raises(EpisodeFailed, match="reward_error: GeneratorExit"):
        scored(lambda: raising(GeneratorExit()), inline=False)


@pytest.mark.parametrize("inline", [True, False])
def test_scores_of_other_libraries_are_plain_numbers(inline: bool) -> None:
    """msgspec cannot serialize numpy's scalars, so they become plain numbers."""
    parts = {"a": numpy.float32(0.5), "b": None, "c": True, "d": torch.tensor(2.0)}
    given = Score(numpy.float64(1.5), numpy.array([1], dtype=numpy.int64), parts)

    async def main() -> Score:
        return await Scorer(5.0).score(Judge(lambda: given, inline=inline), ANSWER)

    found = asyncio.run(main())
    assert found == Score(1.5, [1.0], {"a": 0.5, "c": 1.0, "d": 2.0})
    numbers = [found.reward, *found.turns, *found.parts.values()]
    assert {type(one) for one in numbers} == {float}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(numbers)) == numbers


@pytest.mark.parametrize("inline", [True, False])
def test_reason_that_a_judge_gives_stays(inline: bool) -> None:
    def down() -> float:
        raise EpisodeFailed("judge", "is down")

    with pytest.raises(EpisodeFailed, match="judge: is down"):
        scored(down, inline=inline)


def test_hanging_score_is_given_up_and_holds_no_end() -> None:
    release = threading.Event()
    started = time.monotonic()
    with pytest.raises(
        EpisodeFailed, match=r"reward_timeout: the reward function did not return within 0 s \(rollout.reward_timeout\)"
    ):
        scored(lambda: release.wait(30), timeout=0.05)
    left = [thread.daemon for thread in threading.enumerate() if thread.name == "reward"]
    release.set()
    assert left
    assert all(left)
    assert time.monotonic() - started < 25.0  # the call takes longer


def test_too_many_hanging_scores_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rewards, "THREADS", 2)
    monkeypatch.setattr(rewards, "MOST_HANGING", 3)

    async def main() -> None:
        release, scorer = threading.Event(), Scorer(0.05)
        judge = Judge(lambda: release.wait(30))
        asking = asyncio.gather(*(scorer.score(judge, ANSWER) for _ in range(3)), return_exceptions=True)
        found = await asyncio.wait_for(asking, 25)
        assert [str(error)[:14] for error in found] == ["reward_timeout"] * 3  # room for the third: none waits for ever
        with pytest.raises(AsyncRLError, match="3 calls of the reward function have not returned"):
            await scorer.score(judge, ANSWER)
        release.set()
        await until(lambda: not scorer.hanging)
        scorer._timeout = 60.0
        assert (await scorer.score(judge, ANSWER)).reward == 1.0

    asyncio.run(main())


def test_cancelled_scores_give_their_room_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "THREADS", 1)

    async def main() -> None:
        begun, release, scorer = threading.Event(), threading.Event(), Scorer(0.2)
        waiting = asyncio.ensure_future(scorer.score(Judge(lambda: begun.set() or release.wait(60)), ANSWER))
        await until(begun.is_set)
        waiting.cancel()
        scorer._timeout = 60.0
        assert (await asyncio.wait_for(scorer.score(Judge(lambda: 1.0), ANSWER), 30)).reward == 1.0
        assert scorer.hanging == 1
        release.set()

    asyncio.run(main())


# --- what is told of them -------------------------------------------------------------------------------------


def test_flood_of_one_fault_is_cut_and_others_still_told() -> None:
    now, told = 0.0, []
    faults = FailureReporter(lambda text, trace: told.append((text, trace)), clock=lambda: now)
    for number in range(PER_MINUTE + 7):
        faults.tell("judge", f"g{number}", EpisodeFailed("judge", "is down"))
    assert len(told) == PER_MINUTE
    assert told[0] == ("g0 failed: judge: is down", None)
    faults.tell("agent_timeout", "g99", EpisodeFailed("agent_timeout"))
    assert told[-1][0] == "g99 failed: agent_timeout"
    now = 61.0
    faults.tell("judge", "g100", EpisodeFailed("judge", "is down"))
    assert told[-1][0] == "g100 failed: judge: is down (7 more of these were left out)"
    for number in range(PER_MINUTE + 1):  # the new minute has as many, and no more
        faults.tell("judge", f"g{101 + number}", EpisodeFailed("judge", "is down"))
    assert told[-1][0] == f"g{100 + PER_MINUTE - 1} failed: judge: is down"
    now = 122.0
    faults.tell("judge", "g200", EpisodeFailed("judge", "is down"))
    assert told[-1][0] == "g200 failed: judge: is down (2 more of these were left out)"
    for number in range(PER_MINUTE - 1):
        faults.tell("judge", f"g{201 + number}", EpisodeFailed("judge", "is down"))
    now = 183.0
    faults.tell("judge", "g300", EpisodeFailed("judge", "is down"))
    assert told[-1][0] == "g300 failed: judge: is down"  # none was left out


def test_default_agent_is_an_agent_for_an_episode() -> None:
    async def main() -> Trajectory:
        episode = Episode(FakeClient().generate(), EpisodeTimeouts(60.0, 60.0, None), FakeTemplate())
        return await episode.play(SingleTurn(), PROMPT, one)

    assert asyncio.run(main()).reward == 1.0


async def never() -> float:
    await asyncio.Event().wait()
    return 0.0


async def broken() -> float:
    raise KeyError("no reference")


def test_async_reward_is_ended_by_its_limit() -> None:
    async def half() -> float:
        return 0.5

    assert scored(half, inline=True) == scored(half) == 0.5
    with pytest.raises(
        EpisodeFailed, match=r"reward_timeout: the reward function did not return within 0 s \(rollout.reward_timeout\)"
    ):
        scored(never, inline=True, timeout=0.05)
    with pytest.raises(EpisodeFailed, match="reward_error: KeyError: 'no reference'"):
        scored(broken, inline=True)


# --- threads of agents ----------------------------------------------------------------------------------------


def test_waiting_threads_of_agents_hold_nobody() -> None:
    """An agent's thread may wait for the model, and the model for what this process writes to disk."""

    async def main() -> None:
        loop, answered = asyncio.get_running_loop(), threading.Event()
        contain(loop)
        waiting = [asyncio.create_task(asyncio.to_thread(answered.wait)) for _ in range(100)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                await asyncio.to_thread(answered.set)
                assert await asyncio.gather(*waiting) == [True] * 100
                with pytest.raises(SystemExit):
                    await loop.run_in_executor(None, sys.exit, 3)
        finally:
            answered.set()

    asyncio.run(main())


HANGS = """
import asyncio, threading
from asyncrl.rollout.serving import contain

async def main():
    contain(asyncio.get_running_loop())
    asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0)
    raise KeyError("the reason")

asyncio.run(main())
"""


def test_hanging_threads_of_agents_do_not_hold_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "KeyError: 'the reason'" in done.stderr) == (1, True), done.stderr
