"""Groups are whole or replayed; faults of the environment are counted, bugs surface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest

from asyncrl.agents.single_turn import SingleTurn
from asyncrl.errors import AsyncRLError, ConfigError, EngineError, EpisodeFailed
from asyncrl.extension import PlayerHooks, RolloutHooks
from asyncrl.rollout.agent import load_agent
from asyncrl.rollout.episode import Episode
from asyncrl.rollout.limiter import FixedConcurrency
from asyncrl.schema import Generate, Group, Prompt, Trajectory, Turn
from tests.fakes import FakeEngine, FakeTemplate, echo, in_turn
from tests.rollout.working import LIMITS, Site


async def no_score(trajectory: Trajectory) -> Trajectory:
    return Trajectory(trajectory.turns, 0.0)


class Failing:
    """Plays one turn, unless `fault(number of the episode)` returns an error."""

    def __init__(self, fault: Callable[[int], Exception | None]) -> None:
        self.fault, self.episodes, self.alive = fault, 0, 0

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        number, self.episodes = self.episodes, self.episodes + 1
        self.alive += 1
        try:
            if error := self.fault(number):
                raise error
            return await SingleTurn().run(prompt, generate)
        finally:
            self.alive -= 1


def leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error


def test_every_admitted_group_is_played_whole_and_scored() -> None:
    async def main() -> None:
        site = Site()
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        groups = site.buffer.take() or []
        assert [(one.slot, one.prompt_ids) for one in groups] == [(0, [12, 0, 11]), (1, [12, 1, 11])]
        assert [[t.reward for t in one.trajectories] for one in groups] == [[1.0] * 3, [2.0] * 3]
        assert site.ledger().groups.issued == 4  # admission is the limit

    asyncio.run(main())


def test_failed_sibling_rejects_its_group_by_its_reason() -> None:
    async def main() -> None:
        agent = Failing(lambda n: EpisodeFailed("judge", "no answer") if n == 1 else None)
        site = Site(agent)
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        ledger = site.ledger()
        assert ledger.groups.rejected == {"judge": 1}
        assert ledger.groups.issued == 5
        assert agent.alive == 0
        groups = site.buffer.take() or []
        assert [one.uid for one in groups] == ["g00000001a0000", "g00000002a0000"]  # without slot 0
        assert all(len(one.trajectories) == 3 for one in groups)

    asyncio.run(main())


def test_several_failed_siblings_are_one_rejection() -> None:
    async def main() -> None:
        site = Site(Failing(lambda n: EpisodeFailed("timeout") if n < 3 else None))
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        assert site.ledger().groups.rejected == {"timeout": 1}

    asyncio.run(main())


def test_finally_failed_request_costs_its_group_alone() -> None:
    async def main() -> None:
        site = Site(Failing(lambda n: EngineError("no token arrived") if n == 4 else None))
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        assert site.ledger().groups.rejected == {"engine": 1}

    asyncio.run(main())


def test_every_token_that_engines_wrote_is_accounted_for() -> None:
    """Also those of turns that the agent threw away, and of groups that failed."""

    async def main() -> None:
        site = Site(Failing(lambda n: EpisodeFailed("judge") if n == 4 else None), waste=5)
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        ledger = site.ledger()
        assert ledger.tokens.discarded == 4 * 3 * 5
        assert ledger.tokens.rejected > 0
        assert ledger.tokens.generated == ledger.tokens.held + ledger.tokens.discarded + ledger.tokens.rejected

    asyncio.run(main())


def test_error_of_ours_ends_the_worker() -> None:
    async def main() -> None:
        error = AsyncRLError("a bug in asyncrl: KeyError()")
        site = Site(Failing(lambda n: error if n == 4 else None))
        with pytest.raises(BaseExceptionGroup) as caught:
            await site.run_until(lambda: False)
        assert list(leaves(caught.value)) == [error]

    asyncio.run(main())


def test_bug_in_the_client_is_no_fault_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        def broken(*_: Any) -> Any:
            raise KeyError("ours")

        client = FakeEngine(echo()).client()
        monkeypatch.setattr(client.inflight, "_body", broken)
        episode = Episode(client.generate(), LIMITS, FakeTemplate())
        with pytest.raises(AsyncRLError, match=r"a bug in asyncrl: KeyError\('ours'\)") as caught:
            await episode.play(SingleTurn(), Prompt("p0", [1], {}, "length"), no_score)
        assert type(caught.value) is AsyncRLError
        assert isinstance(caught.value.__cause__, KeyError)
        await client.close()

    asyncio.run(main())


def test_agents_error_costs_its_group_with_a_traceback() -> None:
    async def main() -> None:
        site = Site(Failing(lambda n: ValueError("a typo") if n == 4 else None))
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        assert site.ledger().groups.rejected == {"agent_error": 1}
        ((text, trace),) = site.told
        assert text.startswith(f"g00000001a0000 failed: agent_error: ValueError: a typo ({__file__}:")
        assert trace
        assert trace.endswith("ValueError: a typo\n")
        assert "in run" in trace

    asyncio.run(main())


def test_agent_that_raises_every_time_ends_the_worker() -> None:
    async def main() -> None:
        site = Site(Failing(lambda _: ValueError("a typo")), max_failures=5)
        with pytest.raises(BaseExceptionGroup) as caught:
            await site.run_until(lambda: False)
        text = "5 groups in a row failed, the first with: agent_error: ValueError: a typo"
        assert any(str(error).startswith(f"{text} ({__file__}:") for error in leaves(caught.value))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (lambda found: [Turn([], found), Turn([1], found)], "turn 1 holds tokens that no engine wrote for it"),
        (lambda found: [Turn([9], found)], "turn 0 follows other tokens than the engine read (4 in the place of 3)"),
        (lambda found: [], "the trajectory has no turn"),
        (lambda found: None, "agent_error: TypeError"),
    ],
)
def test_agent_can_return_only_what_engines_wrote(turns: Callable[[Any], Any], text: str) -> None:
    class Inventive:
        async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
            found = turns(await generate(prompt.token_ids))
            return Trajectory([*found])

    async def main() -> None:
        site = Site(Inventive(), max_failures=1)
        with pytest.raises(BaseExceptionGroup) as caught:
            await site.run_until(lambda: False)
        assert text in str(list(leaves(caught.value)))

    asyncio.run(main())


def test_bug_beside_a_failed_sibling_still_surfaces() -> None:
    async def main() -> None:
        faults = {0: EpisodeFailed("judge"), 1: AsyncRLError("a bug")}
        site = Site(Failing(faults.get))
        with pytest.raises(BaseExceptionGroup) as caught:
            await site.run_until(lambda: False)
        assert faults[1] in list(leaves(caught.value))

    asyncio.run(main())


@pytest.mark.parametrize(("then", "last"), [("down", ""), ("gone", "; the last with: judge: gone")])
def test_failures_in_a_row_end_the_worker_with_both_reasons(then: str, last: str) -> None:
    async def main() -> None:
        site = Site(Failing(lambda n: EpisodeFailed("judge", "down" if n == 0 else then)), max_failures=5)
        with pytest.raises(BaseExceptionGroup) as caught:
            await site.run_until(lambda: False)
        first = next(leaves(caught.value))
        assert type(first) is AsyncRLError
        assert str(first) == f"5 groups in a row failed, the first with: judge: down{last}"

    asyncio.run(main())


def test_success_between_failures_starts_the_count_anew() -> None:
    async def main() -> None:
        agent = Failing(lambda n: EpisodeFailed("judge") if n % 6 == 0 and n < 60 else None)
        site = Site(agent, max_failures=2, limiter=FixedConcurrency(1))
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        assert site.ledger().groups.rejected["judge"] >= 1

    asyncio.run(main())


def test_running_groups_keep_their_limit() -> None:
    async def main() -> None:
        most = 0
        agent = Failing(lambda n: EpisodeFailed("judge") if n % 5 == 0 else None)
        site = Site(agent, bound=4, limiter=FixedConcurrency(2))

        def done() -> bool:
            nonlocal most
            most = max(most, site.ledger().groups.running)
            return site.ledger().groups.ready == 10

        await site.run_until(done)
        assert most == 2

    asyncio.run(main())


@pytest.mark.parametrize(("oversample", "rejected"), [(0, {}), (1, {"surplus": 1})])
def test_groups_of_a_resumed_run_are_played_before_new_ones(oversample: int, rejected: dict[str, int]) -> None:
    """With one place, none is admitted until they are ready: a place that waits for admission would be lost."""

    async def main() -> None:
        site = Site(bound=0, buffer={"oversample": oversample}, limiter=FixedConcurrency(1))
        outstanding = site.outstanding()
        await site.run_until(lambda: site.ledger().groups.running == 0, outstanding)
        groups = site.ledger().groups
        assert (len(outstanding), groups.ready, dict(groups.rejected)) == (2 + oversample, 2, rejected)

    asyncio.run(main())


@pytest.mark.parametrize("path", ["no_such_module:Agent", "asyncrl.agents.single_turn:Missing", "nothing", ""])
def test_unloadable_agent_names_field_value_and_remedy(path: str) -> None:
    with pytest.raises(ConfigError, match=r"Must be an import path, module:name") as caught:
        load_agent(path, {})
    assert (caught.value.field, caught.value.value) == ("agent", path)


async def _of_a_question(question: object) -> float:
    return 0.0


async def _of_a_limit(prompt: object, generate: object, *, limit: int) -> float:
    return 0.0


class _OfAQuestion:
    async def run(self, question: object) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("name", "params", "field", "told"),
    [
        ("_of_a_question", {}, "task.agent", r"async function of \(prompt, generate\).* This one takes \(question"),
        ("_OfAQuestion", {}, "task.agent", r"This one takes \(question"),
        ("_of_a_limit", {}, "task.agent_params", "missing a required (keyword-only )?argument: 'limit'"),
        ("_of_a_limit", {"limt": 3}, "task.agent_params", "limit|limt"),
    ],
)
def test_agent_of_other_arguments_is_refused_at_the_start(
    name: str, params: dict[str, Any], field: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        load_agent(f"{__name__}:{name}", params, "task.agent")
    assert caught.value.field == field
    load_agent(f"{__name__}:_of_a_limit", {"limit": 3})


def test_default_agent_loads() -> None:
    assert isinstance(load_agent("asyncrl.agents.single_turn:SingleTurn", {}), SingleTurn)


# --- groups that are not accepted, and groups that nobody waits for -------------------------------------------


def test_unaccepted_group_is_counted_and_replaced() -> None:
    async def main() -> None:
        verdicts = iter([True, "no_signal", False, *[True] * 100])
        site = Site(accept=lambda group: next(verdicts))
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        ledger = site.ledger()
        assert ledger.groups.rejected == {"no_signal": 1, "not_accepted": 1}
        assert ledger.tokens.rejected > 0

    asyncio.run(main())


@pytest.mark.parametrize("verdict", [numpy.True_, numpy.False_, 1, None])
def test_verdicts_of_other_types_mean_their_truth(verdict: Any) -> None:
    async def main() -> None:
        verdicts = iter([verdict, *[True] * 100])
        site = Site(accept=lambda group: next(verdicts))
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        assert site.ledger().groups.rejected == ({} if verdict else {"not_accepted": 1})

    asyncio.run(main())


def test_task_in_which_nothing_is_accepted_ends_the_worker() -> None:
    async def main() -> None:
        site = Site(accept=lambda group: "no_signal", max_rejections=5)
        with pytest.raises(BaseExceptionGroup) as caught:
            await site.run_until(lambda: False)
        error, *_ = leaves(caught.value)
        assert "rejected 5 groups in a row, the last with 'no_signal'" in str(error)

    asyncio.run(main())


class Stuck:
    """Agent that never ends for chosen prompts."""

    def __init__(self, prompts: set[int]) -> None:
        self.prompts, self.begun, self.alive = prompts, 0, 0

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        if prompt.token_ids[1] not in self.prompts:
            return await SingleTurn().run(prompt, generate)
        await generate(prompt.token_ids)
        self.begun += 1
        self.alive += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.alive -= 1
        raise AssertionError


@pytest.mark.parametrize(("options", "reason"), [({"oversample": 1}, "surplus"), ({"over_age": "drop"}, "over_age")])
def test_abandoned_group_is_stopped_and_its_tokens_counted(options: dict[str, Any], reason: str) -> None:
    async def main() -> None:
        agent = Stuck({0})
        site = Site(agent, buffer=options)

        woken: list[asyncio.Future[None]] = []

        def trained_two() -> bool:
            if agent.begun and site.buffer.take():
                site.worker._groups._buffer.publish(site.buffer.version + 1)
                woken.append(asyncio.ensure_future(site.worker._groups._wake()))
            return site.buffer.version >= 2 and agent.alive == 0

        await site.run_until(trained_two)
        ledger = site.ledger()
        assert ledger.groups.rejected[reason] == 1
        assert ledger.tokens.rejected >= 3  # a token of each sibling

    asyncio.run(main())


# --- several tasks ------------------------------------------------------------------------------------------


def test_groups_have_the_size_of_their_task_and_are_scored_by_it() -> None:
    async def main() -> None:
        site = Site(batch_groups=20, draw=in_turn("length", "long"))
        await site.run_until(lambda: site.ledger().groups.ready == 40)
        groups = site.buffer.take() or []
        assert {one.task for one in groups} == {"length", "long"}
        for one in groups:
            length = one.prompt_ids[1] % 3 + 1
            assert (one.task == "long") == (one.prompt_ids[1] >= 1000)
            expected = [10.0 * length] * 5 if one.task == "long" else [1.0 * length] * 3
            assert [t.reward for t in one.trajectories] == expected

    asyncio.run(main())


class Heard(RolloutHooks):
    """Groups that were played to their end."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def group(self, group: Group) -> None:
        self.groups.append(group)


def test_listeners_hear_of_every_whole_group() -> None:
    heard = Heard()

    async def main() -> None:
        verdicts = iter([False, True, False, *[True] * 100])
        agent = Failing(lambda n: EpisodeFailed("judge") if n == 1 else None)
        site = Site(agent, accept=lambda group: next(verdicts), listeners=[heard])
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        assert site.ledger().groups.rejected == {"not_accepted": 2, "judge": 1}

    asyncio.run(main())
    assert len(heard.groups) == 6


class Annotating(PlayerHooks):
    """Names the state of every turn after its group."""

    async def annotate(self, prompt: Prompt, trajectory: Trajectory, group: str) -> list[dict[str, Any]]:
        return [{"state": f"of {group}"} for _ in trajectory.turns]


def test_extension_changes_turns_of_training_episodes_only() -> None:
    async def states(purpose: str) -> set[str]:
        site = Site(hooks=[Annotating(), PlayerHooks()])
        session = site.client.generate(purpose=purpose)
        found = await site.player.episode(Prompt("p", [12, 1, 11], {}, "length"), session)
        return {turn.state for turn in found.turns} - {f"of {session.group}"}

    assert asyncio.run(states("training")) == set()
    assert asyncio.run(states("evaluation")) == {""}
