"""The teacher beside the reward: what is asked of it, for whom, and what its failures cost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl.errors import EngineError, EpisodeFailed
from asyncrl.extensions.distill.engines import TeacherStats
from asyncrl.extensions.distill.scorer import TeacherScorer
from asyncrl.rollout.player import means
from asyncrl.schema import Completion, Prompt, Trajectory, Turn, VersionSpan
from tests.fakes import until
from tests.rollout.working import Site


class Scored:
    """Gives every token the number of its place, as a negative logarithm, unless `fault` says otherwise."""

    def __init__(self, fault: Any = lambda number: None) -> None:
        self.asked: list[tuple[list[int], int, str]] = []
        self._fault = fault

    async def logprobs(self, token_ids: list[int], start: int, key: str) -> list[float]:
        self.asked.append((token_ids, start, key))
        number = len(self.asked)
        await asyncio.sleep(0)
        if error := self._fault(number):
            raise error
        return [-float(place) for place in range(start, len(token_ids))]

    def take_figures(self) -> TeacherStats:
        return TeacherStats(tokens=20, cached=5, retried=1)


def turn(*token_ids: int, observation: list[int] | None = None) -> Turn:
    spans = [VersionSpan(0, 0, len(token_ids))] if token_ids else []
    return Turn(observation or [], Completion(list(token_ids), [-0.5] * len(token_ids), spans, "stop"), reward=2.0)


PROMPT = Prompt("p", [12, 1, 11], {}, "length")


def taught(turns: list[Turn]) -> tuple[list[dict[str, Any]], Scored]:
    engines = Scored()
    return asyncio.run(TeacherScorer(engines).annotate(PROMPT, Trajectory(turns), "g7")), engines


def test_turns_get_the_teachers_of_their_own_tokens() -> None:
    turns = [turn(3, 4), turn(5, observation=[50, 51])]
    found, engines = taught(turns)
    assert engines.asked == [([12, 1, 11, 3, 4, 50, 51, 5], 3, "g7")]
    assert found == [{"teacher": [-3.0, -4.0]}, {"teacher": [-7.0]}]


def test_scoring_starts_at_the_policys_first_token() -> None:
    found, engines = taught([turn(), turn(5, 6, observation=[50]), turn()])
    assert engines.asked == [([12, 1, 11, 50, 5, 6], 4, "g7")]
    assert found == [{"teacher": []}, {"teacher": [-4.0, -5.0]}, {"teacher": []}]


def test_episode_without_a_token_is_not_asked_for() -> None:
    found, engines = taught([turn()])
    assert engines.asked == []
    assert found == [{}]


def test_failed_engines_fail_the_episode_by_a_reason() -> None:
    teacher = TeacherScorer(Scored(lambda _: EngineError("down")))
    with pytest.raises(EpisodeFailed, match="teacher: down") as caught:
        asyncio.run(teacher.annotate(PROMPT, Trajectory([turn(1)]), "g"))
    assert caught.value.reason == "teacher"


def test_figures_have_the_names_of_the_metrics() -> None:
    assert means(TeacherScorer(Scored()).take_sums()) == {
        "teacher/tokens": 20,
        "teacher/cached": 0.25,
        "teacher/retried": 1,
        "time/teacher": 0.0,
    }


# --- in the worker ------------------------------------------------------------------------------------------


def test_every_committed_group_is_scored_under_its_name() -> None:
    engines = Scored()

    async def main() -> None:
        site = Site(hooks=[TeacherScorer(engines)])
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        groups = site.buffer.take() or []
        for group in groups:
            for one in group.trajectories:
                assert [len(turn.teacher) for turn in one.turns] == [
                    len(turn.completion.token_ids) for turn in one.turns
                ]
                assert one.turns[0].teacher[0] == -len(group.prompt_ids)

    asyncio.run(main())
    assert len(engines.asked) >= 4 * 3


def test_group_that_the_teacher_fails_is_rejected_for_it() -> None:
    async def main() -> None:
        engines = Scored(lambda number: EngineError("down") if number == 2 else None)
        site = Site(hooks=[TeacherScorer(engines)])
        await site.run_until(lambda: site.ledger().groups.ready == 4)
        ledger = site.ledger()
        assert ledger.groups.rejected == {"teacher": 1}
        assert ledger.groups.issued == 5
        assert ledger.tokens.rejected > 0
        assert any("teacher: down" in text for text, _ in site.told)

    asyncio.run(main())


def test_teacher_is_asked_while_the_reward_is_worked_out() -> None:
    order: list[str] = []

    class Watched(Scored):
        async def logprobs(self, token_ids: list[int], start: int, key: str) -> list[float]:
            order.append("teacher")
            return await super().logprobs(token_ids, start, key)

    async def main() -> Trajectory:
        from asyncrl.agents.single_turn import SingleTurn
        from asyncrl.rollout.episode import Episode, EpisodeTimeouts
        from tests.fakes import FakeClient, FakeTemplate

        teacher = TeacherScorer(Watched())

        async def score(trajectory: Trajectory) -> Trajectory:
            await until(lambda: order)
            order.append("reward")
            return Trajectory(trajectory.turns, 1.0)

        session: Any = FakeClient().generate()
        episode = Episode(session, EpisodeTimeouts(60.0, 60.0, None), FakeTemplate())
        return await episode.play(SingleTurn(), PROMPT, score, [lambda found: teacher.annotate(PROMPT, found, "g")])

    found = asyncio.run(main())
    assert order == ["teacher", "reward"]
    assert found.reward == 1.0
    assert found.turns[0].teacher == [-3.0, -4.0]


def test_answers_of_an_evaluation_are_not_scored() -> None:
    engines = Scored()

    async def main() -> None:
        site = Site(hooks=[TeacherScorer(engines)])
        session = site.client.generate(purpose="evaluation")
        found = await site.player.episode(PROMPT, session)
        assert found.turns[0].teacher == []

    asyncio.run(main())
    assert engines.asked == []
