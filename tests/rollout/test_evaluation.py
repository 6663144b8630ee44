"""Evaluation measures the right questions, names its versions, and neither it nor training waits for the other."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.agents.single_turn import SingleTurn
from asyncrl.engine.client import GenerationClient
from asyncrl.errors import AsyncRLError, EngineError, EpisodeFailed
from asyncrl.rollout.episode import EpisodeTimeouts
from asyncrl.rollout.evaluation import Attempt, Evaluations, pass_at, summarize
from asyncrl.rollout.player import GroupPlayer
from asyncrl.rollout.timelines import Timelines
from asyncrl.schema import Generate, Prompt, Trajectory
from tests.fakes import FakeEngine, FakeTemplate, LengthTask, echo, tiny_config, trajectory, until


class Site:
    """Evaluations of two sets, through the real client, in front of an engine that answers with its version."""

    def __init__(self, questions: int = 3, fault: Callable[[int], Exception | None] = lambda _: None, **eval_: Any):
        self.engine = FakeEngine(echo())
        self.client = self.engine.client()
        self.fault, self.episodes, self.alive, self.most = fault, itertools.count(), 0, 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.lines: list[dict[str, Any]] = []
        self.records: list[Any] = []
        serial = itertools.count()
        names = ("near", "far")
        sets = {name: [Prompt("", [12, next(serial), 11], {}, name) for _ in range(questions)] for name in names}
        settings = tiny_config(**{f"eval.{name}": value for name, value in eval_.items()}).eval
        player = GroupPlayer({}, {}, FakeTemplate(), EpisodeTimeouts(60.0, 60.0, None), Mock())
        player.episode = self.play  # type: ignore[assignment,method-assign]
        self.evaluations = Evaluations(
            player.attempts,
            self.client,
            dict.fromkeys(names, LengthTask()),
            sets,
            settings,
            self.lines.extend,
            Timelines([self.records.append]),
        )

    async def play(self, prompt: Prompt, generate: Generate) -> Trajectory:
        if error := self.fault(next(self.episodes)):
            raise error
        self.alive += 1
        self.most = max(self.most, self.alive)
        try:
            await self.gate.wait()
            return await SingleTurn().run(prompt, generate)
        finally:
            self.alive -= 1


def at(play: Callable[[Site], Any], **settings: Any) -> None:
    async def main() -> None:
        site = Site(**settings)
        await asyncio.wait_for(play(site), 60)
        await site.client.close()

    asyncio.run(main())


# --- lines --------------------------------------------------------------------------------------------------


def test_every_set_has_its_line_and_its_own_questions() -> None:
    async def play(site: Site) -> None:
        lines = await site.evaluations.now()
        assert lines == site.lines
        assert [(line["set"], line["questions"], line["failed"]) for line in lines] == [("near", 3, 0), ("far", 3, 0)]
        asked = [request["input_ids"][1] for request in site.engine.requests]
        assert sorted(asked) == list(range(6))
        assert all(request["sampling_params"]["temperature"] == 0.0 for request in site.engine.requests)
        assert not any(name.startswith("pass@") for name in lines[0])

    at(play)


def test_every_question_has_a_timeline_of_its_attempts() -> None:
    def fault(number: int) -> Exception | None:
        return EpisodeFailed("judge") if number == 0 else None

    async def play(site: Site) -> None:
        await site.evaluations.now()
        assert [(one.purpose, one.slot, one.task) for one in site.records] == [("evaluation", -1, "near")] * 2 + [
            ("evaluation", -1, "far")
        ] * 2
        assert sorted(one.outcome for one in site.records) == ["committed"] * 3 + ["failed"]
        assert [len(one.episodes) for one in site.records] == [3] * 4
        assert sum(episode.reward is None for one in site.records for episode in one.episodes) == 1

    at(play, questions=2, fault=fault, samples=2)


def test_samples_of_a_question_are_one_request() -> None:
    async def play(site: Site) -> None:
        (line, _) = await site.evaluations.now()
        asked = [(r["sampling_params"]["n"], r["sampling_params"]["temperature"]) for r in site.engine.requests]
        assert sorted(asked) == [(1, 0.0)] * 6 + [(5, 0.7)] * 6
        assert len(set(site.engine.routes)) == 6  # both go to the question's engine
        assert [name for name in line if name.startswith("pass@")] == ["pass@1", "pass@2", "pass@4"]

    at(play, samples=5, temperature=0.7)


def answered(right: list[bool], greedy: bool = True) -> list[Attempt]:
    return [trajectory(float(greedy)), *(trajectory(float(one)) for one in right)]


def summary(*answers: list[Attempt]) -> dict[str, Any]:
    return summarize("near", answers, bool)


def test_figures_by_hand() -> None:
    found = summary(answered([True, False, False, False], greedy=False), answered([True, True, False, False]))
    assert (found["accuracy"], found["reward/mean"], found["tokens/mean"]) == (0.5, 0.5, 2.0)
    assert found["pass@1"] == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert found["pass@2"] == pytest.approx((1 / 2 + 5 / 6) / 2)
    assert found["pass@4"] == 1.0
    assert "pass@8" not in found


def test_failed_answers_are_counted_and_left_out() -> None:
    judge, engine = EpisodeFailed("judge"), EngineError("gone")
    found = summary(
        [judge, trajectory(1.0), engine],
        [trajectory(1.0), trajectory(0.0), trajectory(1.0)],
        [trajectory(0.0), judge, engine],
    )
    assert (found["questions"], found["failed"], found["accuracy"]) == (3, 4, 0.5)
    assert found["pass@1"] == (1.0 + 0.5) / 2
    assert found["pass@2"] == 1.0  # of the one question that has two samples


def test_unanswered_set_is_an_error_with_the_last_reason() -> None:
    with pytest.raises(AsyncRLError, match="no question of near could be answered; the last failed with: judge: down"):
        summary([EngineError("gone")], [EpisodeFailed("judge", "down")])


# --- pass@k -------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(samples: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    choices = list(itertools.combinations(samples, k))
    assert pass_at(k, sum(samples), len(samples)) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-15)


@pytest.mark.parametrize(("right", "expected"), [(0, 0.0), (1, 1024 / 100_000), (99_000, 1.0), (100_000, 1.0)])
def test_pass_at_k_is_exact_for_many_samples(right: int, expected: float) -> None:
    assert pass_at(1024, right, 100_000) == expected


# --- faults and neighbours ----------------------------------------------------------------------------------


def test_question_that_fails_does_not_end_the_run_and_a_bug_does() -> None:
    async def play(site: Site) -> None:
        lines = await site.evaluations.now()
        assert sum(line["failed"] for line in lines) == 2
        site.fault = lambda n: ValueError("a bug") if n == 8 else None
        with pytest.raises(BaseExceptionGroup, match="unhandled errors"):
            await site.evaluations.now()
        assert len(site.lines) == 2

    at(play, fault={1: EpisodeFailed("judge"), 4: EngineError("gone")}.get)


@pytest.mark.parametrize(("samples", "most"), [(0, 2), (3, 8)])
def test_questions_in_flight_keep_their_limit_over_sets(samples: int, most: int) -> None:
    async def play(site: Site) -> None:
        site.gate.clear()
        asking = asyncio.create_task(site.evaluations.now())
        await until(lambda: site.alive == most)
        site.gate.set()
        assert len(await asking) == 2
        assert site.most == most

    at(play, max_running=2, samples=samples)


def test_lines_name_the_versions_that_answered() -> None:
    async def play(site: Site) -> None:
        site.evaluations.published(2)
        await until(lambda: len(site.engine.requests) == 4)  # one at a time: the second set has begun
        site.client.inflight.hold()
        site.client.inflight.release(3)
        await until(lambda: site.lines)
        versions = {line["set"]: (line["version_min"], line["version_max"]) for line in site.lines}
        assert versions["near"] == (2, 2)
        assert versions["far"] == (2, 3)

    async def main(site: Site) -> None:
        site.client.inflight.release(2)
        await play(site)

    at(main, max_running=1, every=2)


def test_evaluation_is_due_by_version_and_skips_are_told() -> None:
    async def play(site: Site) -> None:
        for version in range(1, 4):
            site.evaluations.published(version)
            await asyncio.sleep(0)
        await until(lambda: len(site.lines) == 2)
        assert [line["skipped"] for line in site.lines] == [0, 0]
        site.gate.clear()
        for version in range(4, 9):  # 4 begins and is slow; 6 and 8 are not begun
            site.evaluations.published(version)
            await until(lambda: site.alive)
        site.gate.set()
        await until(lambda: len(site.lines) == 4)
        assert [line["skipped"] for line in site.lines[2:]] == [2, 2]
        site.evaluations.published(10)
        await until(lambda: len(site.lines) == 6)
        assert [line["skipped"] for line in site.lines[4:]] == [0, 0]

    at(play, every=2)


def test_evaluation_on_request_comes_after_the_one_under_way() -> None:
    async def play(site: Site) -> None:
        site.gate.clear()
        site.evaluations.published(5)
        site.evaluations.published(6)
        asking = asyncio.create_task(site.evaluations.now())
        await until(lambda: site.alive == 6)
        assert site.most == 6  # not 12
        site.gate.set()
        assert await asking == site.lines[2:]
        assert len(site.lines) == 4

    at(play, every=5)


def test_repeated_request_shares_the_evaluation_of_the_first() -> None:
    """As when a connection breaks, and the server lives. A request that is cancelled, at any point, ends none."""

    async def play(site: Site) -> None:
        site.gate.clear()
        site.evaluations.published(5)
        site.evaluations.published(6)
        asking = [asyncio.create_task(site.evaluations.now()) for _ in range(3)]
        await until(lambda: site.alive == 6)
        asking.pop().cancel()
        site.gate.set()
        await until(lambda: len(site.lines) == 2)
        site.gate.clear()
        asking += [asyncio.create_task(site.evaluations.now()) for _ in range(2)]
        await until(lambda: site.alive == 6)
        asking.pop().cancel()
        asking.pop(0).cancel()  # the one for which the second evaluation began
        await asyncio.sleep(0)
        site.gate.set()
        assert await asking[0] == await asking[1] == site.lines[2:]
        assert len(site.lines) == 4

    at(play, every=5)


def test_resumed_process_evaluates_after_agents_started() -> None:
    async def play(site: Site) -> None:
        site.evaluations.ready.clear()
        asking = asyncio.create_task(site.evaluations.now())
        site.evaluations.published(5)
        await asyncio.sleep(0)
        assert site.evaluations._running is None
        site.evaluations.go_on(None, range(5, 6), running=False)
        assert await asking == site.lines
        assert len(site.lines) == 2

    at(play, every=5)


def test_newest_version_is_evaluated_once() -> None:
    """As at the end of a run whose last version is due for an evaluation."""

    async def play(site: Site) -> None:
        site.evaluations.published(5)
        assert await site.evaluations.now() == site.lines
        assert len(site.lines) == 2  # one for each set
        assert await site.evaluations.now() == site.lines

    at(play, every=5)


def test_error_of_an_evaluation_is_raised_at_the_next_version() -> None:
    async def play(site: Site) -> None:
        site.evaluations.published(1)
        running: Any = site.evaluations._running
        await until(running.done)
        with pytest.raises(AsyncRLError, match="no question of near could be answered"):
            site.evaluations.published(2)

    at(play, every=1, fault=lambda _: EpisodeFailed("judge"))


def test_without_sets_nothing_runs() -> None:
    async def main() -> None:
        client: GenerationClient = FakeEngine(echo()).client()
        evaluations = Evaluations(AsyncMock(), client, {}, {}, tiny_config(**{"eval.every": 1}).eval, print)
        evaluations.published(1)
        assert await evaluations.now() == []

    asyncio.run(main())


def test_resumed_process_repeats_no_written_evaluation() -> None:
    """One had begun at version 4 before the state was kept; version 6 was announced since, and the run ends there."""
    written = {version: [{"set": name, "version_min": version} for name in ("near", "far")] for version in (4, 6)}

    async def begun(*before: int, evaluated: int = 4, since: range = range(5, 7)) -> list[int]:
        site = Site(every=2)
        site.evaluations._earlier = [line for version in before for line in written[version]]
        found: list[int] = []

        async def evaluate() -> list[dict[str, Any]]:
            found.append(site.evaluations.newest or 0)
            return []

        site.evaluations._evaluate = evaluate  # type: ignore[method-assign]
        site.evaluations.go_on(evaluated, since, running=bool(since))
        if running := site.evaluations._running:
            await running
        assert await site.evaluations.now() == (written[6] if 6 in before else [])
        await site.client.close()
        return found

    async def main() -> None:
        assert await begun(4, 6) == []
        assert await begun(4) == [6]
        assert (await begun())[-1] == 6
        assert await begun(6, evaluated=6, since=range(7, 7)) == []  # nothing was announced since

    asyncio.run(asyncio.wait_for(main(), 60))
