"""The proxy over HTTP: authentication, refusals, and requests that end with their client or episode."""

from __future__ import annotations

import asyncio
import functools
import json
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
from httpx_aiohttp import AiohttpTransport

from asyncrl.errors import AsyncRLError, ConfigError, EngineError
from asyncrl.extensions.proxy import server
from asyncrl.extensions.proxy.server import Proxy
from asyncrl.extensions.proxy.session import ProxySession
from asyncrl.network.addresses import Access
from asyncrl.network.connections import aiohttp_session
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from tests.agents.talking import Talking, written
from tests.extensions.proxy.behind import ASKS, BOS_ID, DEADLINE, EOS_ID, PAIR, Blocking, Raising, soon, template, user
from tests.fakes import FakeEngine, echo

ASK = {"messages": [user("1")]}
FIRST = [BOS_ID, 1, ASKS]


def client(proxy: Proxy, key: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    transport = AiohttpTransport(client=partial(aiohttp_session, Access("")))
    return httpx.AsyncClient(base_url=proxy.base_url, headers=headers, timeout=DEADLINE, transport=transport)


def error(response: httpx.Response) -> tuple[int, str]:
    """Its status and its message, in OpenAI's form."""
    told = response.json()["error"]
    assert {"message", "type", "param", "code"} == told.keys()
    assert response.headers["x-should-retry"] == "false"
    return response.status_code, told["message"]


# --- keys and routes ----------------------------------------------------------------------------------------


def test_key_names_an_open_episode_and_no_other(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        one, other = (Talking([written(n, EOS_ID)], template()) for n in (3, 4))
        async with client(proxy) as http:

            async def ask(key: str) -> httpx.Response:
                return await http.post("/chat/completions", json=ASK, headers={"Authorization": f"Bearer {key}"})

            async with proxy.session(one) as first, proxy.session(other) as second:
                assert first.key != second.key
                assert (await ask(second.key)).json()["choices"][0]["message"]["content"] == "4"
                assert (await ask(first.key)).json()["choices"][0]["message"]["content"] == "3"
                for wrong in ("x", "sk-" + first.key):
                    assert error(await ask(wrong))[0] == 401
                assert error(await ask(first.key[:-1]))[0] == 410  # of this proxy, and of no open episode
            assert error(await ask(first.key)) == (410, "the episode of this API key has ended")
            assert error(await http.post("/chat/completions", json=ASK))[0] == 401
            assert error(await http.get("/models"))[0] == 401
        assert [one.asked[0].context, other.asked[0].context] == [FIRST, FIRST]

    runner.run(main())


def test_client_of_several_episodes_names_each_in_a_header(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        one, other = (Talking([written(n, EOS_ID)] * 2, template()) for n in (3, 4))
        async with client(proxy, proxy.secret) as http:

            async def ask(name: str) -> httpx.Response:
                return await http.post("/chat/completions", json=ASK, headers={"X-Session-ID": name})

            async with proxy.session(one) as first, proxy.session(other) as second:
                assert (await ask(second.name)).json()["choices"][0]["message"]["content"] == "4"
                for name in (first.name, f"{first.name}.critic"):
                    assert (await ask(name)).json()["choices"][0]["message"]["content"] == "3"
                assert error(await ask("another"))[0] == 410
                found = first.trajectory(FIRST, 1.0)
                assert [turn.role for turn in found.turns] == ["", "critic"]
                assert [turn.role for turn in first.trajectory(FIRST, 1.0, roles={"critic"}).turns] == ["critic"]
            assert error(await ask(first.name))[0] == 410
        assert [[asked.role for asked in talking.asked] for talking in (one, other)] == [["", "critic"], [""]]

    runner.run(main())


def test_histories_of_two_actors_with_the_same_words_are_two(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        talking = Talking([written(1, 2, EOS_ID), written(3, EOS_ID)], template())
        async with client(proxy, proxy.secret) as http, proxy.session(talking) as session:
            messages = [user("1")]
            for role in ("left", "right"):  # the second repeats the first one's words, tokenized anew
                headers = {"X-Session-ID": f"{session.name}.{role}"}
                said = (await http.post("/chat/completions", json={"messages": messages}, headers=headers)).json()
                messages += [said["choices"][0]["message"], user("1")]
        assert talking.asked[1].context[: len(FIRST) + 2] == [*FIRST, PAIR, EOS_ID]

    runner.run(main())


def test_routes_are_those_of_the_api(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        async with proxy.session(Talking([written(3, EOS_ID)] * 2, template())) as session:
            async with client(proxy, session.key) as http:
                assert (await http.get("/models")).json()["data"][0]["id"] == "policy"
                assert (await http.get("/models/org/any-name")).json()["object"] == "model"
                assert (await http.post("/completions", json={"prompt": "1"})).json()["choices"][0]["text"] == "3"
                assert (await http.post("/reward", json={"reward": 2})).json() == {}
                assert error(await http.post("/embeddings", json={})) == (404, "POST /v1/embeddings: Not Found")
                assert error(await http.get("/reward"))[0] == 405
            assert session.posted == 2.0

    runner.run(main())


# --- bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": "\\ud800"}', b"NaN"])
def test_garbage_is_refused_and_the_episode_goes_on(proxy: Proxy, runner: asyncio.Runner, body: bytes) -> None:
    async def main() -> None:
        generate = Talking([written(3, EOS_ID)], template())
        async with proxy.session(generate) as session, client(proxy, session.key) as http:
            assert error(await http.post("/chat/completions", content=body))[0] == 400
            assert (await http.post("/chat/completions", json=ASK)).status_code == 200

    runner.run(main())


DEEP: Any = functools.reduce(lambda inner, _: [inner], range(900), [])
TOJSON = "{% for message in messages %}{{ message | tojson }}{% endfor %}="


@pytest.mark.parametrize(
    ("call", "status"),
    [(DEEP, 400), (json.dumps(DEEP), 200), ({"a": [1]}, 200)],
    ids=["deep", "deep-text", "flat"],
)
def test_deep_arguments_end_no_episode(proxy: Proxy, runner: asyncio.Runner, call: Any, status: int) -> None:
    async def main() -> None:
        called = {"id": "call00000", "function": {"name": "7", "arguments": call}}
        asks = {"messages": [user("1"), {"role": "assistant", "tool_calls": [called]}]}
        generate = Talking([written(3, EOS_ID)], template(TOJSON))
        async with proxy.session(generate) as session, client(proxy, session.key) as http:
            assert (await http.post("/chat/completions", json=asks)).status_code == status

    runner.run(main())


def test_a_deep_body_is_refused_and_the_episode_goes_on(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        generate = Talking([written(3, EOS_ID)], template())
        async with proxy.session(generate) as session, client(proxy, session.key) as http:
            for asks in (ASK | {"extra": DEEP}, {"messages": DEEP}, {"messages": [user(DEEP)]}, ASK | {"tools": DEEP}):
                refused = error(await http.post("/chat/completions", json=asks))
                assert refused == (400, "the body nests lists and objects more than 64 deep: send it flatter")
            assert (await http.post("/chat/completions", json=ASK)).status_code == 200

    runner.run(main())


def test_a_token_that_the_model_does_not_have_is_refused(proxy: Proxy, runner: asyncio.Runner) -> None:
    engine = FakeEngine(echo())

    async def main() -> None:
        client_of_engines = engine.client(vocabulary=20)
        episode = Episode(client_of_engines.generate(), EpisodeTimeouts(60.0, 60.0, None), template())
        async with proxy.session(episode) as session, client(proxy, session.key) as http:
            status, message = error(await http.post("/completions", json={"prompt": [1_000_000]}))
            assert status == 400
            assert "token 1000000, but the model's vocabulary has 20 tokens" in message
            assert (await http.post("/completions", json={"prompt": [1]})).status_code == 200
        await client_of_engines.close()

    runner.run(main())
    assert [request["input_ids"] for request in engine.requests] == [[1]]


@pytest.mark.parametrize("told", [True, False])
def test_body_that_is_too_long_is_refused(
    proxy: Proxy, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    monkeypatch.setattr(server, "MOST_BYTES", 1 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * (1 << 16)

    async def main() -> None:
        generate = Talking([written(3, EOS_ID)], template())
        async with proxy.session(generate) as session, client(proxy, session.key) as http:
            headers = {"content-length": str(1 << 22)} if told else {}
            refused = await http.post("/chat/completions", content=pieces(), headers=headers)
            assert error(refused) == (413, "a body may have 1048576 bytes")
            assert (await http.post("/chat/completions", json=ASK)).status_code == 200

    runner.run(main())


def test_refusals_are_counted(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        before = proxy.figures.refused
        async with proxy.session(Talking([], template())) as session, client(proxy, session.key) as http:
            status, message = error(await http.post("/chat/completions", json={**ASK, "top_p": 0.5}))
            assert (status, message.split(".")[0]) == (400, "top_p: got 0")
        assert proxy.figures.refused == before + 1

    runner.run(main())


# --- clients that go, episodes that end ---------------------------------------------------------------------


def test_request_is_cancelled_with_its_client(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        generate, before = Blocking(written(3, EOS_ID)), proxy.figures.abandoned
        async with proxy.session(generate) as session, client(proxy, session.key) as http:
            asking = asyncio.create_task(http.post("/chat/completions", json=ASK))
            await soon(generate.entered)
            asking.cancel()
            await soon(generate.cancelled)
            generate.go.set()
            assert (await http.post("/chat/completions", json=ASK)).status_code == 200
        assert proxy.figures.abandoned == before + 1
        assert len(session.trajectory(FIRST, None).turns) == 1

    runner.run(main())


def test_request_under_way_ends_with_its_episode(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        generate = Blocking(written(3, EOS_ID))
        async with proxy.session(generate) as session:
            http = client(proxy, session.key)
            asking = asyncio.create_task(http.post("/chat/completions", json=ASK))
            await soon(generate.entered)
        assert error(await asking) == (410, "the episode of this API key has ended")
        await soon(generate.cancelled)
        await http.aclose()

    runner.run(main())


class Told(dict[Any, str]):
    """Tells when something is added."""

    def __init__(self, added: asyncio.Event) -> None:
        super().__init__()
        self._added = added

    def __setitem__(self, item: Any, role: str) -> None:
        super().__setitem__(item, role)
        self._added.set()


def test_half_a_body_ends_with_its_episode(
    proxy: Proxy, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever sends it slowly for ever holds nothing."""

    async def main() -> None:
        address, began = httpx.URL(proxy.base_url), asyncio.Event()
        reader, writer = await asyncio.open_connection(address.host, address.port)
        async with proxy.session(Talking([], template())) as session:
            monkeypatch.setattr(session, "_calls", Told(began))
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session.key}\r\n"
            writer.write(f"{head}content-length: 9\r\n\r\n{{".encode())
            await soon(began)
        async with asyncio.timeout(DEADLINE):
            assert b"410" in await reader.readline()
        writer.close()
        await writer.wait_closed()

    runner.run(main())


def test_every_one_of_many_episodes_gets_its_own_answers(proxy: Proxy, runner: asyncio.Runner) -> None:
    many = 500

    async def episode(number: int, http: httpx.AsyncClient, all_ask: asyncio.Barrier) -> None:
        generate = Talking([written(number % 10, EOS_ID), written(number // 10 % 10, EOS_ID)], template())
        async with proxy.session(generate) as session:
            history = [user(str(number))]
            await all_ask.wait()
            for _ in range(2):
                headers = {"Authorization": f"Bearer {session.key}"}
                answer = await http.post("/chat/completions", json={"messages": history}, headers=headers)
                history += [answer.json()["choices"][0]["message"], user("5")]
        assert [message["content"] for message in history[1::2]] == [str(number % 10), str(number // 10 % 10)]
        assert generate.asked[1].context[: len(generate.asked[0].context)] == generate.asked[0].context

    async def main() -> None:
        all_ask = asyncio.Barrier(many)
        async with client(proxy) as http, asyncio.TaskGroup() as group:
            for number in range(many):
                group.create_task(episode(number, http, all_ask))
        assert not proxy._sessions

    runner.run(main())


# --- errors of ours -----------------------------------------------------------------------------------------


async def ask_and_wait(proxy: Proxy, raised: Exception, answers: list[httpx.Response]) -> None:
    """An agent that is answered an error, and does not mind."""
    asking: asyncio.Task[None] | None = None

    async def ask(session: ProxySession) -> None:
        async with client(proxy, session.key) as http:
            answers.append(await http.post("/chat/completions", json=ASK))

    try:
        async with proxy.session(Raising(raised)) as session:
            asking = asyncio.create_task(ask(session))
            await asyncio.Event().wait()
    finally:
        if asking:
            await asking


def test_fleet_error_ends_the_episode_by_its_name(proxy: Proxy, runner: asyncio.Runner) -> None:
    answers: list[httpx.Response] = []
    with pytest.raises(EngineError, match="no engine is left"):
        runner.run(ask_and_wait(proxy, EngineError("no engine is left"), answers))
    assert error(answers[0]) == (503, "the engines cannot answer, and the episode is over: no engine is left")


def test_bug_is_no_fault_of_the_agent(proxy: Proxy, runner: asyncio.Runner) -> None:
    answers: list[httpx.Response] = []
    with pytest.raises(AsyncRLError, match="a bug in the proxy: ZeroDivisionError") as raised:
        runner.run(ask_and_wait(proxy, ZeroDivisionError("by hand"), answers))
    assert type(raised.value) is AsyncRLError  # which ends the run
    assert error(answers[0])[0] == 500


def test_signals_stay_with_the_process_around_the_server(runner: asyncio.Runner) -> None:
    async def main() -> None:
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        made, generate = Proxy(), Blocking()
        made.start()
        made.start()  # it serves already

        async def episode() -> None:
            async with made.session(generate) as session, client(made, session.key) as http:
                assert error(await http.post("/chat/completions", json=ASK))[0] == 410

        playing = asyncio.create_task(episode())
        await soon(generate.entered)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        async with asyncio.timeout(DEADLINE):
            await made.close()
            await playing
        with pytest.raises(AsyncRLError, match="the proxy's server has ended"):
            async with made.session(generate):
                pass
        with pytest.raises(httpx.TransportError):
            async with client(made) as http:
                await http.get("/models")

    runner.run(main())


def test_answers_are_sent_at_once(proxy: Proxy, runner: asyncio.Runner) -> None:
    """Nagle's algorithm would delay each answer by 40 ms."""

    async def main() -> None:
        async with proxy.session(Talking([], template())) as session, client(proxy, session.key) as http:
            await http.get("/models")
            assert proxy._server
            connections = [one.transport.get_extra_info("socket") for one in proxy._server.server_state.connections]
            assert connections
            assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in connections)

    runner.run(main())


def test_address_that_is_taken_is_told(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        told = r"agent_params.port: got \d+\. .*127\.0\.0\.1:\d+ .*in use.*: choose another port"
        with pytest.raises(ConfigError, match=told):
            Proxy(port=httpx.URL(proxy.base_url).port or 0).start()

    runner.run(main())


def test_address_of_the_sixth_version_stands_in_brackets() -> None:
    assert Proxy(host="::1", port=80).base_url == "http://[::1]:80/v1"


def test_proxy_that_was_never_started_closes(runner: asyncio.Runner) -> None:
    runner.run(Proxy().close())


def test_unknown_form_of_calls_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent_params\.tool_format: got 'xml'"):
        Proxy(tool_format="xml")


def test_stream_is_events_to_the_last(proxy: Proxy, runner: asyncio.Runner) -> None:
    async def main() -> None:
        generate = Talking([written(3, EOS_ID)], template())
        async with proxy.session(generate) as session, client(proxy, session.key) as http:
            body = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
            answer = await http.post("/chat/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last, end = answer.text.split("\n\n")
        assert (last, end) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert "".join(one["delta"].get("content", "") for chunk in chunks for one in chunk["choices"]) == "3"
        assert [one["finish_reason"] for chunk in chunks for one in chunk["choices"]] == [None, None, "stop"]
        assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}

    runner.run(main())
