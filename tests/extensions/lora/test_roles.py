"""Roles as the client plays them: each with its adapter, or by one past version in an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import httpx
import pytest

from asyncrl import retries
from asyncrl.config import Config
from asyncrl.engine.client import GenerationClient
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.lora.rules import past_versions
from asyncrl.extensions.lora.served import ServedAdapters, adapter_names
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.schema import Completion, Generate, Prompt, Trajectory, VersionSpan
from tests.engine.asking import PROMPT, answering, asked, named
from tests.engine.resuming import resumed
from tests.fakes import FakeEngine, FakeTemplate, Reply, completion, pieces, stream, tiny_config, until

ROLES = {"proposer": {"adapter": "b"}, "solver": {}, "old": {"past": {"every": 2, "keep": 3}}}


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.0)


def config() -> Config:
    lora = {"trainer.lora.rank": 4, "weights.lora": "versions", "rollout.max_staleness": 1}
    return tiny_config(**{**lora, "agents.roles": ROLES})


def played(engine: FakeEngine, play: Callable[[GenerationClient], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """Play with a client of these roles; afterwards nothing is in use."""
    made = config()

    async def checked(client: GenerationClient) -> Any:
        found = await play(client)
        await until(lambda: not client.inflight.served.versions())
        return found

    names = {"names": adapter_names(made, "run0"), "agents": made.agents, "past_versions": partial(past_versions, made)}
    names |= {name: settings.pop(name) for name in ("names", "per", "agents") if name in settings}
    return asked(engine, checked, served=ServedAdapters(**names), retry_timeout=5.0, **settings)


def test_a_role_has_its_own_adapter_at_the_version_of_the_others() -> None:
    engine = answering()

    async def play(client: GenerationClient) -> list[Completion]:
        client.inflight.release(3)
        session = client.generate()
        return [await session(PROMPT, None, role) for role in ("proposer", "solver", "")]

    found = played(engine, play)
    assert named(engine) == ["run0-b-v3", "run0-v3", "run0-v3"]
    assert [request["extra_key"] for request in engine.requests] == ["run0-b-v3", "run0-v3", "run0-v3"]
    assert [one.versions for one in found] == [[VersionSpan(3, 0, 3)]] * 3


@pytest.mark.parametrize(("per", "expected"), [("episode", "run0-b-v1"), ("completion", "run0-b-v2")])
def test_an_episode_that_keeps_one_version_keeps_it_in_all_roles(per: str, expected: str) -> None:
    engine = answering()

    async def play(client: GenerationClient) -> None:
        client.inflight.release(1)
        session = client.generate()
        await session(PROMPT, None, "solver")
        client.inflight.release(2)
        await session(PROMPT, None, "proposer")
        session.close()

    played(engine, play, per=per)
    assert named(engine) == ["run0-v1", expected]


def test_siblings_in_different_roles_share_no_request() -> None:
    engine = answering()

    async def play(client: GenerationClient) -> None:
        client.inflight.release(2)
        sessions = [client.generate(group="g", sample=str(number)) for number in range(4)]
        roles = ("proposer", "proposer", "solver", "old")
        await asyncio.gather(*(one(PROMPT, None, role) for one, role in zip(sessions, roles, strict=True)))

    played(engine, play)
    assert sorted(request["sampling_params"]["n"] for request in engine.requests) == [1, 1, 2]


def test_a_role_without_an_adapter_ends_the_run_by_name() -> None:
    async def play(client: GenerationClient) -> None:
        with pytest.raises(ConfigError, match="the role 'judge', which has no adapter"):
            await client.generate()(PROMPT, None, "judge")

    only = tiny_config(**{"trainer.lora.rank": 4, "agents.roles": {"solver": {"adapter": "b"}}})
    played(answering(), play, agents=only.agents)


# --- past versions ------------------------------------------------------------------------------------------


def session_at(client: GenerationClient, born: int, sample: str = "g 0", **more: Any) -> GenerationSession:
    return client.generate(group="g", sample=sample, born=born, **more)


def test_past_versions_are_drawn_among_the_newest_kept() -> None:
    engine = answering()

    async def play(client: GenerationClient) -> list[set[int]]:
        client.inflight.release(9)
        found = []
        for born in (1, 4, 8):
            turns = [await session_at(client, born, f"g {number}")(PROMPT, None, "old") for number in range(30)]
            found.append({one.versions[0].version for one in turns})
        return found

    assert played(engine, play) == [{0}, {0, 2, 4}, {4, 6, 8}]
    assert {name for name in named(engine) if name} == {f"run0-v{version}" for version in (2, 4, 6, 8)}


def test_episode_keeps_its_past_version_through_everything() -> None:
    whole = pieces(completion(2, (1,), "length"))
    for name in ("weight_versions", "finish_reason"):
        whole[-1]["meta_info"].pop(name)
    broken: Reply = [stream(whole).removesuffix(b"data: [DONE]\n\n"), httpx.ReadError("reset by peer")]
    engine = answering(before=lambda number: broken if number == 0 else None)

    async def play(client: GenerationClient) -> list[int]:
        client.inflight.release(5)
        session = session_at(client, 4)
        turns = [await session(PROMPT, None, "old")]  # its engine dies
        client.inflight.release(9)
        session.forget()
        turns.append(await session(PROMPT, None, "old"))
        client.inflight.restore(5, {}, 0)
        client.inflight.release(5)
        again = resumed(client, "g", "g 0", 4, 0, [])
        turns.append(await again(PROMPT, None, "old"))
        return [one.versions[0].version for one in turns]

    assert len(set(played(engine, play))) == 1
    assert len(set(named(engine))) == 1
    assert len(engine.requests) == 4


def test_a_resumed_completion_goes_to_the_role_that_asked_for_it() -> None:
    """Two roles may ask for the same tokens."""
    engine = answering()

    async def play(client: GenerationClient) -> tuple[list[Completion], list[Completion]]:
        client.inflight.release(4)
        session = session_at(client, 4)
        first = [await session(PROMPT, None, role) for role in ("solver", "old")]
        again = resumed(client, "g", "g 0", 4, session.received, session.said())
        return first, [await again(PROMPT, None, role) for role in ("old", "solver")][::-1]

    before, after = played(engine, play)
    assert before == after
    assert len(engine.requests) == 2


def test_tokens_of_past_versions_are_counted_by_themselves() -> None:
    async def play(client: GenerationClient) -> tuple[int, dict[str, int], int]:
        client.inflight.release(4)
        session = session_at(client, 4)
        for role in ("solver", "old", "old"):
            await session(PROMPT, None, role)
        with client.inflight.served.held(client.inflight.version) as adapter:
            await session_at(client, 4, purpose="evaluation", pinned=adapter)(PROMPT, None, "old")
        return session.received, dict(client.inflight.tokens), client.inflight.late_tokens

    assert played(answering(), play) == (3, {"training": 3, "past": 6, "evaluation": 3}, 0)


def test_an_evaluation_plays_against_the_newest_past_version() -> None:
    engine = answering()

    async def play(client: GenerationClient) -> None:
        client.inflight.release(5)
        for number in range(8):
            with client.inflight.served.held(client.inflight.version) as adapter:
                asks = {"purpose": "evaluation", "pinned": adapter}
                await session_at(client, 5, f"q {number}", **asks)(PROMPT, None, "old")  # type: ignore[arg-type]

    played(engine, play)
    assert named(engine) == ["run0-v4"] * 8


class Roles:
    """Agent whose roles speak one after the other."""

    def __init__(self, *roles: str) -> None:
        self._roles = roles

    async def run(self, prompt: Prompt, generate: Generate) -> float:
        for role in self._roles:
            await generate(prompt.token_ids, role=role)
        return 1.0


def trajectory(*roles: str) -> Trajectory:
    async def scored(one: Trajectory) -> Trajectory:
        return one

    async def play(client: GenerationClient) -> Trajectory:
        client.inflight.release(4)
        episode = Episode(session_at(client, 4), EpisodeTimeouts(5.0, 5.0, None), FakeTemplate())
        return await episode.play(Roles(*roles), Prompt("p", PROMPT, {}, "t"), scored)

    return played(answering(), play)


def test_turns_of_past_versions_are_not_in_the_trajectory() -> None:
    found = trajectory("solver", "old", "proposer")
    assert [turn.role for turn in found.turns] == ["solver", "proposer"]
    assert found.reward == 1.0


def test_episode_without_a_turn_of_a_trained_role_fails() -> None:
    with pytest.raises(EpisodeFailed, match=r"no_turn: .*a role that is trained"):
        trajectory("old", "old")
