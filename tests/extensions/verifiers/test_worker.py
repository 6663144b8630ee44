"""What becomes of every end of an episode, told by a fake worker and by the real one."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.agents.linking import check
from asyncrl.errors import ConfigError, EngineError, EpisodeFailed
from asyncrl.extensions.verifiers.extension import FIGURES, VerifiersPlayer
from asyncrl.extensions.verifiers.process import Launch
from asyncrl.extensions.verifiers.task import EpisodesElsewhere, Verifiers
from asyncrl.rewards.reward import RewardInput
from asyncrl.rollout.episode import EpisodeTimeouts
from asyncrl.rollout.player import GroupPlayer
from asyncrl.rollout.reporters import FailureReporter
from asyncrl.schema import Prompt, Trajectory
from tests.agents.talking import Talking, alive, dead
from tests.extensions.proxy.behind import DEADLINE, Blocking, Raising, soon, template
from tests.extensions.verifiers.playing import digits, episode, fake, faked, made, outcome, play, real
from tests.fakes import FakeEngine, echo

TOLD = {
    "setup raises": ("environment_error", True),
    "reward raises": ("environment_error", True),
    "finalize raises": ("environment_error", True),
    "nan": ("environment_garbage", True),
    "setup hangs": ("environment_timeout", True),
    "reward hangs": ("environment_timeout", True),
    "finalize hangs": ("environment_timeout", True),
    "worker dies": ("environment_died", True),
}
"""What verifiers scores 0, or does not score, and a trainer must not."""
MORE = {
    "1": (1.0,),
    "0.25": (0.25,),
    "agent hangs": (0.0,),  # its own time is a rule of the game
    "missing": ("environment_garbage", True),
    "unrewarded": ("environment_garbage", True),
    "garbage": ("environment_garbage", True),
    "long": (0.0,),
    "sandbox": ("sandbox", True),
    "tool": ("tool", True),
    "transport": ("hub", True),
    "harness": ("agent_error", False),
    "refused": ("agent_error", False),
}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)


@pytest.mark.usefixtures("fakes")
def test_every_end_has_its_reason_and_none_is_a_zero() -> None:
    told = TOLD | MORE
    task = fake([*told, "reward is 0"])

    async def all_of_them() -> list[tuple[Any, ...]]:
        return [outcome(await episode(task, number)) for number in range(len(told) + 1)]

    found = play(task, all_of_them)
    assert dict(zip(told, found[:-1], strict=True)) == told
    assert found[-1] == (0.0,), "a worker that had died was replaced, and a reward of 0 is one"


@real
def test_verifiers_itself_ends_episodes_so() -> None:
    stages = {"setup": 1.0, "scoring": 1.0, "finalize": 1.0}
    task = made("toy_faulty", agent={"timeout": stages})
    named = {task.question(number)["messages"][0]["content"] for number in range(len(TOLD))}
    assert named == {"012"}
    names = [one["name"] for one in task._tasks]

    async def all_of_them() -> list[tuple[Any, ...]]:
        return [outcome(await episode(task, names.index(how))) for how in [*TOLD, "reward is 0"]]

    found = play(task, all_of_them)
    assert dict(zip(TOLD, found[:-1], strict=True)) == TOLD
    assert found[-1] == (0.0,)


@real
def test_agent_that_runs_out_of_its_own_time_is_scored() -> None:
    task = made("toy_faulty", agent={"timeout": {"rollout": 1.0}})
    names = [one["name"] for one in task._tasks]

    async def slow() -> Any:
        asking = Blocking()
        return await episode(task, names.index("agent hangs"), asking)

    ended = play(task, slow)
    assert isinstance(ended, EpisodeFailed), "no answer was given, so nothing can be trained"
    assert (ended.reason, ended.detail) == ("agent_error", "it made no request to the model")


@real
@pytest.mark.parametrize(
    ("name", "args", "roles", "rewards"),
    [
        ("toy_digits", {}, [""], [0.0]),
        ("toy_adder", {}, [""], [0.0]),
        ("toy_guess", {}, ["left", "right", "right", "right"], [1.0, 0.0, 0.0, 0.0]),
        ("toy_digits", {"id": "best-of-n", "n": 2}, ["", "agent-2"], [1.0, 1.0]),
    ],
)
def test_every_trained_trace_is_a_sample_with_its_reward(
    name: str, args: dict[str, Any], roles: list[str], rewards: list[float]
) -> None:
    task, generate = made(name, **args), Talking(digits(), template())
    ended = play(task, lambda: episode(task, 0, generate))
    assert isinstance(ended, Trajectory), ended
    assert [turn.role for turn in ended.turns] == roles
    assert [turn.reward for turn in ended.turns] == rewards
    assert len(ended.samples()) == len(set(roles))
    check(ended, template().begin(task.question(0)["messages"]), generate.asked)


@pytest.mark.usefixtures("fakes")
def test_traces_have_their_rewards_and_judges_none() -> None:
    task, generate = fake(["two"]), Talking(digits(), template())
    ended = play(task, lambda: episode(task, 0, generate))
    assert isinstance(ended, Trajectory)
    assert ended.totals() == {"left": 1.0, "right": 0.5}
    assert [one.role for one in generate.asked] == ["left", "right", "watcher"]


@pytest.mark.usefixtures("fakes")
def test_rewards_and_measures_are_metrics_of_the_accepted() -> None:
    FIGURES.clear()
    task = fake(["1", "0", "nan"])

    async def several() -> None:
        await asyncio.gather(*(episode(task, number) for number in (0, 1, 1, 2)))

    play(task, several)
    assert VerifiersPlayer().take_sums() == {"episodes/metric/length": (9.0, 3), "reward/part/mark": (1.0, 3)}


@pytest.mark.usefixtures("fakes")
def test_episode_is_played_again_after_a_death_and_counted(tmp_path: Path) -> None:
    task = fake([f"dies once at {tmp_path / 'mark'}"])

    async def with_retry() -> tuple[Trajectory, Any]:
        client = FakeEngine(echo(3)).client(temperature=1.0)
        said: list[str] = []
        limits = EpisodeTimeouts(agent=DEADLINE, reward=DEADLINE, episode=DEADLINE)
        failures = FailureReporter(lambda text, _: said.append(text))
        player = GroupPlayer({"t": task.agent}, {"t": never}, template(), limits, failures, retries=1)
        question = task.question(0)
        prompt = Prompt("p", template().begin(question["messages"]), question, "t", 0)
        ended = await player.episode(prompt, client.generate(1.0))
        await client.close()
        assert "environment_died" in said[0]
        assert "the last words" in said[0]
        return ended, player.take_sums()["episodes/retried"]

    ended, retried = play(task, with_retry)
    assert (ended.reward, retried) == (0.0, (1, 0))


def never(answer: RewardInput) -> float:
    """Not called: the environment rewards."""
    raise AssertionError


@pytest.mark.usefixtures("fakes")
def test_failed_engine_is_named_before_the_workers_error() -> None:
    task = fake(["1"])
    with pytest.raises(EngineError, match="engine 3 is gone"):
        play(task, lambda: episode(task, 0, Raising(EngineError("engine 3 is gone"))))


@pytest.mark.usefixtures("fakes")
def test_abandoned_episode_leaves_the_worker_to_others() -> None:
    task = fake(["1"])

    async def give_up() -> tuple[Any, ...]:
        blocked = Blocking()
        given_up = asyncio.create_task(episode(task, 0, blocked))
        await soon(blocked.entered)
        given_up.cancel()
        await soon(blocked.cancelled)
        return outcome(await episode(task, 0))

    assert play(task, give_up) == (1.0,)


def pid(agent: EpisodesElsewhere) -> int:
    assert agent._worker
    return agent._worker._child.pid


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_no_worker_outlives_its_run(how: str) -> None:
    task = fake(["1"])

    async def ends() -> int:
        if how == "killed":
            assert alive(pid(task.agent))
            task.agent._worker._stdin.close()  # type: ignore[union-attr]  # as when this process dies
            await dead(pid(task.agent))
        return pid(task.agent)

    ended = play(task, ends)
    asyncio.run(dead(ended))
    gc.collect()


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("taskset", "told"),
    [
        ({"refused": True}, r"task\.params\.args\.agent\.sampling: got .*top_p.*Remove it"),
        ({"broken": True}, r"(?s)task\.name: got 'fake'.*ended before it was ready.*no such module"),
        ({"names": []}, None),
    ],
)
def test_worker_that_cannot_play_refuses_the_run(taskset: dict[str, Any], told: str | None) -> None:
    if told:
        with pytest.raises(ConfigError, match=told):
            fake(["1"], **taskset)
    else:
        with pytest.raises(ConfigError, match=r"task\.params\.select: .* leaves no task"):
            fake([])


@pytest.mark.usefixtures("fakes")
def test_worker_that_is_not_ready_in_time_is_ended() -> None:
    with pytest.raises(ConfigError, match=r"task\.params\.start_timeout: got 0\.5"):
        Launch("fake", {"taskset": {"sleeps": 1000}}, start_timeout=0.5).tasks()


@pytest.mark.usefixtures("fakes")
def test_tasks_that_are_others_each_time_are_refused() -> None:
    task = fake(["1"], unstable=True)
    with pytest.raises(ConfigError, match=r"others each time that it is loaded"):
        play(task, lambda: episode(task, 0))


@real
@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"agent": {"sampling": {"top_p": 0.9}}}, r"args\.agent\.sampling: got .*top_p.*rollout\.temperature"),
        ({"agent": {"retries": {"max_retries": 1}}}, r"args\.agent\.retries: .*rollout\.retries"),
        ({"retries": {"max_retries": 1}}, r"args\.retries: .*rollout\.retries"),
        (
            {"taskset": {"task": {"judges": [{"id": "reference"}]}}},
            r"judges\.0\.api_key_var: got 'PRIME_API_KEY'.*paid",
        ),
        ({"agent": {"nothing": 1}}, r"(?s)ended before it was ready.*nothing"),
    ],
)
def test_what_cannot_be_trained_with_or_costs_money_is_refused(args: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        made("toy_digits", **args)


def test_question_is_the_task_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    task: Verifiers = fake(["1", "0"])
    assert task.size == 2
    asked: Callable[[int], Any] = task.question
    assert asked(3) == {"messages": [{"role": "user", "content": "012"}], "number": 1, "key": task.keys[1]}
