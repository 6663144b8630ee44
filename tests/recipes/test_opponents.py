"""A model behind an endpoint plays a role; what it cannot answer costs the episode, never a reward."""

from __future__ import annotations

import asyncio
from threading import Event
from typing import Any

import pytest

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl_recipes.self_play.opponents import Endpoint, opponent
from tests.recipes.endpoints import endpoint, saying

CHAT = [{"role": "user", "content": "Your move."}]


def ask(made: Endpoint) -> str:
    async def main() -> str:
        async with asyncio.timeout(20):
            return await made(CHAT)

    return asyncio.run(main())


def test_endpoint_is_asked_with_its_model_key_and_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENA_KEY", "secret")
    with endpoint(lambda _: saying("[3]")) as (url, asked):
        settings = {"base_url": url, "model": "big", "api_key_env": "ARENA_KEY", "temperature": 0.0, "max_tokens": 8}
        made = opponent(settings, "fixed")
        assert isinstance(made, Endpoint)
        assert ask(made) == "[3]"
    assert asked == [("Bearer secret", {"model": "big", "messages": CHAT, "temperature": 0.0, "max_tokens": 8})]


def test_answer_without_text_is_an_empty_move() -> None:
    with endpoint(lambda _: saying(None)) as (url, _):
        assert ask(Endpoint(url, "m")) == ""


def test_endpoint_that_refuses_costs_the_episode() -> None:
    with endpoint(lambda _: (400, {"error": {"message": "too long"}})) as (url, asked):
        with pytest.raises(EpisodeFailed, match=r"opponent: m at http://127.*too long"):
            ask(Endpoint(url, "m"))
        assert len(asked) == 1


def test_endpoint_that_hangs_costs_the_episode_after_its_time() -> None:
    given_up = Event()

    def hang(_: dict[str, Any]) -> tuple[int, Any]:
        assert given_up.wait(20)
        return saying("late")

    with endpoint(hang) as (url, _):
        with pytest.raises(EpisodeFailed, match=r"opponent: m at .*timed out"):
            ask(Endpoint(url, "m", timeout=0.05, max_retries=0))
        given_up.set()


def test_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARENA_KEY", raising=False)
    with pytest.raises(ConfigError, match="set it to the key") as caught:
        opponent({"base_url": "http://127.0.0.1:1/v1", "model": "m", "api_key_env": "ARENA_KEY"}, "fixed.player-1")
    assert (caught.value.field, caught.value.value) == ("fixed.player-1.api_key_env", "ARENA_KEY")
