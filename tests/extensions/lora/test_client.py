"""Versions that are adapters, as the client uses them: one for each completion or episode, and exact versions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import httpx
import pytest

from asyncrl import retries
from asyncrl.config import Config
from asyncrl.engine.client import GenerationClient
from asyncrl.extensions.lora.served import ServedAdapters, adapter_names
from asyncrl.schema import Completion, Exchange, VersionSpan
from tests.engine.asking import PROMPT, answering, asked, named
from tests.engine.resuming import resumed
from tests.fakes import FakeEngine, Reply, completion, pieces, stream, tiny_config, until


@pytest.fixture(autouse=True)
def no_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.0)


def config(**changes: Any) -> Config:
    return tiny_config(**{"trainer.lora.rank": 4, "weights.lora": "versions", **changes})


def played(engine: FakeEngine, play: Callable[[GenerationClient], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """Play with a client whose versions are adapters; once every request has ended, none is in use."""

    async def checked(client: GenerationClient) -> Any:
        found = await play(client)
        await until(lambda: not client._tasks and not client.inflight.served.versions())
        return found

    per = settings.pop("per", "completion")
    served = ServedAdapters(names=adapter_names(config(), "run0"), per=per)
    return asked(engine, checked, served=served, retry_timeout=5.0, **settings)


def test_requests_name_the_newest_adapter_and_tokens_have_it() -> None:
    engine = answering()

    async def play(client: GenerationClient) -> list[Completion]:
        found = []
        for version in (0, 1, 2):
            client.inflight.release(version)
            found.append(await client.generate()(PROMPT))
        return found

    found = played(engine, play)
    assert [one.versions for one in found] == [[VersionSpan(version, 0, 3)] for version in (0, 1, 2)]
    assert named(engine) == [None, "run0-v1", "run0-v2"]
    assert [request["extra_key"] for request in engine.requests] == ["run0-v0", "run0-v1", "run0-v2"]


def test_completion_keeps_its_adapter_after_a_publish() -> None:
    whole = pieces(completion(2, (1,), "length"))
    for name in ("weight_versions", "finish_reason"):
        whole[-1]["meta_info"].pop(name)
    first = stream(whole).removesuffix(b"data: [DONE]\n\n")
    going = asyncio.Event()
    broken: Reply = [first, going, httpx.ReadError("reset by peer")]
    engine = answering(before=lambda number: broken if number == 0 else None)

    async def play(client: GenerationClient) -> tuple[Completion, list[list[int]], int]:
        client.inflight.release(1)
        session = client.generate()
        running = asyncio.ensure_future(session(PROMPT))
        await until(lambda: session.received == 2)
        used = [client.inflight.served.versions()]
        client.inflight.release(2)
        used.append(client.inflight.served.versions())
        going.set()
        return await running, used, client.inflight.figures.inferred_tokens

    found, used, inferred = played(engine, play)
    assert found.versions == [VersionSpan(1, 0, 5)]
    assert named(engine) == ["run0-v1", "run0-v1"]
    assert {request["extra_key"] for request in engine.requests} == {"run0-v1"}
    assert used == [[1], [1]]
    assert inferred == 0


def test_publish_does_not_repeat_a_request_without_a_chunk() -> None:
    """Nothing is held: with full weights it would run under a prefix-cache key that is older than its weights."""
    going = asyncio.Event()
    slow: Reply = [going, stream(pieces(completion(3, (1,), "length")))]
    engine = answering(before=lambda number: slow)

    async def play(client: GenerationClient) -> Completion:
        client.inflight.release(1)
        running = asyncio.ensure_future(client.generate()(PROMPT))
        await until(lambda: engine.requests)
        client.inflight.release(2)
        await asyncio.sleep(0)
        going.set()
        return await running

    assert played(engine, play).versions == [VersionSpan(1, 0, 3)]
    assert len(engine.requests) == 1


@pytest.mark.parametrize(("per", "expected"), [("completion", [1, 2]), ("episode", [1, 1])])
def test_turns_use_the_newest_adapter_or_that_of_the_episode(per: str, expected: list[int]) -> None:
    async def play(client: GenerationClient) -> tuple[list[int], list[int]]:
        client.inflight.release(1)
        session = client.generate()
        turns = [await session(PROMPT)]
        await asyncio.sleep(0)
        client.inflight.release(2)
        session.forget()  # an episode that is tried again is still the same
        turns.append(await session(PROMPT))
        await asyncio.sleep(0)
        used = client.inflight.served.versions()
        session.close()
        return [one.versions[0].version for one in turns], used

    turns, used = played(answering(), play, per=per)
    assert turns == expected
    assert (1 in used) == (per == "episode")


def test_what_an_agent_left_in_flight_ends_with_its_session() -> None:
    """It would keep an adapter beyond the bound. Requests of other sessions go on."""
    going_on = asyncio.Event()
    whole = stream(pieces(completion(3, (1,), "length")))
    engine = answering(before=lambda number: [going_on, whole])

    async def play(client: GenerationClient) -> tuple[list[int], Completion]:
        client.inflight.release(1)
        sessions = [client.generate(group=group) for group in ("g0", "g1")]
        left, other = (asyncio.ensure_future(session(PROMPT)) for session in sessions)
        await until(lambda: len(engine.requests) == 2)
        used = client.inflight.served.versions()
        sessions[0].close()
        await until(left.cancelled)
        going_on.set()
        return used, await other

    used, found = played(engine, play)
    assert (used, found.versions) == ([1], [VersionSpan(1, 0, 3)])


def test_siblings_share_a_request_only_under_the_same_adapter() -> None:
    engine = answering()

    async def play(client: GenerationClient) -> list[Completion]:
        client.inflight.release(2)
        sessions = [client.generate(group="g", pinned=adapter) for adapter in (1, 2, 2)]
        return list(await asyncio.gather(*(session(PROMPT) for session in sessions)))

    found = played(engine, play)
    assert [one.versions[0].version for one in found] == [1, 2, 2]
    assert sorted(cast("list[str]", named(engine))) == ["run0-v1", "run0-v2"]


def test_an_evaluation_keeps_the_adapter_that_it_began_with() -> None:
    async def play(client: GenerationClient) -> tuple[int, list[int]]:
        client.inflight.release(1)
        with client.inflight.served.held(client.inflight.version) as adapter:
            client.inflight.release(2)
            used = client.inflight.served.versions()
            found = await client.generate(purpose="evaluation", pinned=adapter)(PROMPT)
        return found.versions[0].version, used

    assert played(answering(), play) == (1, [1])


def saved(version: int, finish: str, context: list[int] = PROMPT) -> Exchange:
    return Exchange(context, completion(2, (version,), finish))


@pytest.mark.parametrize(
    ("one", "versions", "requests"),
    [
        (saved(1, "stop"), [VersionSpan(1, 0, 2)], 0),  # complete
        (saved(3, ""), [VersionSpan(3, 0, 5)], 1),  # continued by the adapter that is published again
        (saved(2, ""), [VersionSpan(3, 0, 3)], 1),  # its adapter is lost: generated anew
    ],
)
def test_a_resumed_completion_has_one_version(one: Exchange, versions: list[VersionSpan], requests: int) -> None:
    engine = answering()

    async def play(client: GenerationClient) -> Completion:
        client.inflight.restore(3, {}, 0)
        session = resumed(client, "g", "g 0", 0, 2, [one])
        client.inflight.release(3)
        return await session(PROMPT)

    assert played(engine, play).versions == versions
    assert named(engine) == ["run0-v3"] * requests


@pytest.mark.parametrize(("version", "expected"), [(3, [3, 3]), (2, [3, 3])])
def test_resumed_episode_keeps_its_adapter_or_starts_over(version: int, expected: list[int]) -> None:
    engine = answering()

    async def play(client: GenerationClient) -> list[int]:
        client.inflight.restore(3, {}, 0)
        session = resumed(client, "g", "g 0", 0, 2, [saved(version, "stop")])
        client.inflight.release(3)
        turns = [await session(PROMPT), await session([*PROMPT, 5])]
        session.close()
        return [one.versions[0].version for one in turns]

    assert played(engine, play, per="episode") == expected
    assert len(engine.requests) == (1 if version == 3 else 2)


def test_starts_share_no_name_and_version_0_is_the_base() -> None:
    """SGLang loads an unloaded adapter again, from wherever it came, when a request names it."""
    first, second = (adapter_names(config(), run) for run in ("a", "b"))
    assert first
    assert second
    assert (
        len(
            {
                name(version, adapter)
                for name in (first, second)
                for version in range(1, 4)
                for adapter in ("policy", "judge")
            }
        )
        == 12
    )
    assert first(0, "policy") is None
    started = adapter_names(config(**{"trainer.lora.path": "/adapter"}), "a")
    assert started
    assert started(0, "policy") == "a-v0"
    assert started(0, "judge") == "a-judge-v0"
    assert adapter_names(tiny_config(), "a") is None
