"""Reward models over HTTP: what is sent, how much at once, whom, and what every kind of fault costs."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from asyncrl import retries
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.judge.batches import RequestBatcher
from asyncrl.extensions.judge.remote import RewardModel, RewardModelSettings
from asyncrl.extensions.servers import choice
from tests.rewards.doubles import answer

URLS = ["http://one/score", "http://two/score"]
Reply = httpx.Response | Exception | dict[str, Any] | float


class Server:
    """Rewards every text by its length, unless `faults` are left, which come first; None among them is no fault. Its
    first requests wait until there are `hold` of them, and until no more come."""

    def __init__(self, *faults: Reply | None, form: str = "batch", hold: int = 1) -> None:
        self.faults, self.form, self.hold = list(faults), form, hold
        self.requests: list[Any] = []
        self.asked: list[str] = []  # hosts, in order
        self.running = self.most = 0
        self.gate = asyncio.Event()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append(body)
        self.asked.append(request.url.host)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.running == self.hold:
                for _ in range(50):
                    await asyncio.sleep(0)
                self.gate.set()
            await self.gate.wait()
            reply = self.faults.pop(0) if self.faults else None
            if isinstance(reply, Exception):
                raise reply
            if isinstance(reply, httpx.Response):
                return reply
            return httpx.Response(200, json=self.rewards(body) if reply is None else reply)
        finally:
            self.running -= 1

    def rewards(self, body: Any) -> Any:
        if self.form == "batch":
            return {"rewards": [float(len(one["answer"])) for one in body["answers"]]}
        if self.form == "openrlhf":
            return {"rewards": [float(len(query)) for query in body["query"]], "scores": [0.0] * len(body["query"])}
        if self.form == "single":
            return {"reward": len(body["answer"])}
        return float(len(body["response"]))


def asking(
    server: Server, *texts: str, use: Callable[[RewardModel], Awaitable[Any]] | None = None, **settings: Any
) -> list[Any]:
    """The rewards of all texts at once, failures as they are; or what `use` makes of the reward."""
    options: dict[str, Any] = {"urls": URLS[:1], "form": server.form, "deadline": 5.0} | settings

    async def main() -> Any:
        reward = RewardModel(RewardModelSettings(**options), httpx.MockTransport(server))
        try:
            async with asyncio.timeout(60):
                if use:
                    return await use(reward)
                return await asyncio.gather(*(reward(ask(text)) for text in texts), return_exceptions=True)
        finally:
            await reward.close()

    return asyncio.run(main())


def ask(text: str, **record: Any) -> Any:
    return answer(text, messages=[{"role": "user", "content": "Why?"}], **{"answer": "so", **record})


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY", 0.001)
    monkeypatch.setattr(retries, "LONGEST_DELAY", 0.001)


# --- what is sent -------------------------------------------------------------------------------------------

SAMPLE = {"prompt": [{"role": "user", "content": "Why?"}], "answer": "abc", "question": {"answer": "so"}}


@pytest.mark.parametrize(
    ("form", "request_", "reward"),
    [
        ("batch", {"answers": [SAMPLE]}, 3.0),
        ("single", SAMPLE, 3.0),
        ("slime", {"prompt": SAMPLE["prompt"], "response": "abc", "label": "so"}, 3.0),
        ("openrlhf", {"query": ["Why?\nabc"], "prompts": ["Why?"], "labels": ["so"]}, 8.0),
    ],
)
def test_each_form_sends_what_its_servers_read(form: str, request_: Any, reward: float) -> None:
    server = Server(form=form)
    assert asking(server, "abc") == [reward]
    assert server.requests == [request_]


def test_slimes_server_may_answer_an_object_with_a_key() -> None:
    assert asking(Server({"score": 2, "reward": 9}, form="slime"), "abc", reward_key="score") == [2.0]


def test_record_of_parquet_with_dates_and_bytes_is_sent() -> None:
    server = Server()
    row = {"day": datetime.date(2026, 1, 2), "data": b"\xff", "odd": object}
    assert asking(server, use=lambda reward: reward(ask("ab", **row))) == 2.0
    assert server.requests[0]["answers"][0]["question"]["day"] == "2026-01-02"


def test_concurrent_answers_share_batches_with_own_rewards() -> None:
    server = Server()
    texts = ["x" * length for length in range(1, 11)]
    assert asking(server, *texts, max_batch=4, max_wait=0.0) == [float(len(text)) for text in texts]
    assert [len(request["answers"]) for request in server.requests] == [4, 4, 2]


def test_key_comes_from_the_environment_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    heard: list[str] = []

    async def serve(request: httpx.Request) -> httpx.Response:
        heard.append(request.headers["authorization"])
        return httpx.Response(200, json={"rewards": [1.0]})

    async def main() -> float:
        settings = RewardModelSettings(urls=URLS, api_key_env="SOME_KEY")
        return await RewardModel(settings, httpx.MockTransport(serve))(ask("a"))

    assert asyncio.run(main()) == 1.0
    assert heard == ["Bearer secret"]
    with pytest.raises(ConfigError, match="This environment variable is not set"):
        RewardModel(RewardModelSettings(urls=URLS, api_key_env="NO_SUCH_KEY"))


def test_at_least_one_server_must_be_named() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        RewardModel(RewardModelSettings())


# --- how much at once ---------------------------------------------------------------------------------------


def test_no_more_requests_run_at_once_than_are_allowed() -> None:
    server = Server(form="single", hold=3)
    assert asking(server, *"abcdefgh", max_running=3) == [1.0] * 8
    assert server.most == 3


def test_requests_go_to_the_least_busy_healthy_server() -> None:
    server = Server(form="single", hold=6)
    asking(server, *"abcdef", urls=URLS)
    assert sorted(server.asked) == ["one"] * 3 + ["two"] * 3
    down = Server(httpx.Response(500), form="single")

    async def one_after_the_other(reward: RewardModel) -> list[float]:
        return [await reward(ask(text)) for text in "abcd"]

    assert asking(down, use=one_after_the_other, urls=URLS) == [1.0] * 4
    assert down.asked == ["one", "two", "two", "two", "two"]


def test_server_that_failed_is_asked_again_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "REST_SECONDS", 0.0)
    down = Server(httpx.Response(500), form="single")
    assert asking(down, "a", urls=URLS) == [1.0]
    assert down.asked == ["one", "one"]


# --- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut"),
        *(httpx.Response(status) for status in (408, 429, 500, 502, 503)),
    ],
    ids=str,
)
def test_fault_of_the_machinery_is_retried(fault: Reply) -> None:
    server = Server(fault, fault)
    assert asking(server, "ab") == [2.0]
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (httpx.Response(400, text="too long"), "answered 400: too long"),
        (httpx.Response(401), "answered 401"),
        (httpx.Response(200, text="<html>"), "invalid JSON: <html>"),
        ({"scores": [1.0]}, "instead of 1 rewards"),
        ({"rewards": [1.0, 2.0]}, "instead of 1 rewards"),
        ({"rewards": []}, "instead of 1 rewards"),
        ({"rewards": 1.0}, "instead of 1 rewards"),
        ([1.0], "instead of 1 rewards"),
        ({"rewards": ["1.0"]}, "something other than a finite number: '1.0'"),
        ({"rewards": [None]}, "something other than a finite number"),
        ({"rewards": [True]}, "something other than a finite number"),
        (httpx.Response(200, text='{"rewards": [NaN]}'), "something other than a finite number: nan"),
        (httpx.Response(200, text='{"rewards": [Infinity]}'), "something other than a finite number: inf"),
    ],
)
def test_answer_that_is_no_reward_fails_the_episode_once(fault: Any, text: str) -> None:
    server = Server(fault)
    (failure,) = asking(server, "ab")
    assert isinstance(failure, EpisodeFailed)
    assert failure.reason == "reward_model"
    assert text in str(failure)
    assert len(server.requests) == 1


@pytest.mark.parametrize("form", ["single", "slime"])
@pytest.mark.parametrize("reply", [{"score": 1.0}, {"reward": "1"}, "1.0", [1.0], {"reward": float("nan")}])
def test_single_answer_that_is_no_reward_fails_the_episode(form: str, reply: Any) -> None:
    (failure,) = asking(Server(httpx.Response(200, text=json.dumps(reply)), form=form), "ab")
    assert isinstance(failure, EpisodeFailed)
    assert failure.reason == "reward_model"


def test_server_that_never_recovers_fails_at_the_deadline() -> None:
    (failure,) = asking(Server(*[httpx.ConnectError("nobody listens")] * 10_000), "ab", deadline=1.0)
    assert isinstance(failure, EpisodeFailed)
    assert failure.reason == "reward_model"
    assert "no answer within 1 s" in str(failure)
    assert "ConnectError nobody listens" in str(failure)


def test_server_that_hangs_fails_the_episode_at_the_deadline() -> None:
    (failure,) = asking(Server(hold=2), "ab", deadline=0.1)
    assert str(failure) == "reward_model: no answer within 0.1 s, after 0 failed attempts"


def test_refused_batch_is_asked_singly_and_costs_the_guilty() -> None:
    server = Server(httpx.Response(413), None, httpx.Response(413), None)
    found = asking(server, "a", "bb", "ccc", max_batch=3, max_running=1)
    assert (found[0], isinstance(found[1], EpisodeFailed), found[2]) == (1.0, True, 3.0)
    assert [len(request["answers"]) for request in server.requests] == [3, 1, 1, 1]


def test_one_reward_that_is_none_costs_its_answer_alone() -> None:
    found = asking(Server({"rewards": [1.0, None]}), "a", "b")
    assert found[0] == 1.0
    assert isinstance(found[1], EpisodeFailed)


def test_record_without_the_label_costs_its_answer_alone() -> None:
    server = Server(form="openrlhf")

    async def use(reward: RewardModel) -> list[Any]:
        without = answer("ab", messages=[], other=1)
        return await asyncio.gather(reward(ask("ab")), reward(without), return_exceptions=True)

    right, failure = asking(server, use=use)
    assert right == 7.0
    assert isinstance(failure, EpisodeFailed)
    assert failure.reason == "reward_error"


def test_refused_and_cut_connections_of_real_sockets() -> None:
    async def main() -> list[Any]:
        connections = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
            body = b'{"rewards": [4.0]}'
            size = len(body) + (1000 if connections == 1 else 0)  # the first is cut
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode() + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        reward = RewardModel(RewardModelSettings(urls=[url], deadline=30.0))
        first = await reward(ask("a"))
        server.close()
        await server.wait_closed()
        await reward.close()
        refused = RewardModel(RewardModelSettings(urls=[url], deadline=0.2))
        (failure,) = await asyncio.gather(refused(ask("a")), return_exceptions=True)
        await refused.close()
        return [first, connections, failure]

    first, connections, failure = asyncio.run(asyncio.wait_for(main(), 60))
    assert (first, connections) == (4.0, 2)
    assert isinstance(failure, EpisodeFailed)
    assert failure.reason == "reward_model"


# --- batches ------------------------------------------------------------------------------------------------


def test_bug_of_whoever_sends_reaches_all_who_wait() -> None:
    async def send(items: Any) -> Any:
        raise KeyError("no such")

    async def main() -> list[Any]:
        batches: RequestBatcher[int, int] = RequestBatcher(send, max_batch=2, max_wait=60.0)
        async with asyncio.timeout(30):
            return await asyncio.gather(batches.ask(1), batches.ask(2), return_exceptions=True)

    assert [type(one) for one in asyncio.run(main())] == [KeyError, KeyError]


def test_batch_goes_when_it_is_full_or_its_first_item_has_waited() -> None:
    sent: list[list[int]] = []

    async def send(items: Any) -> Any:
        sent.append(list(items))
        return [-item for item in items]

    async def main() -> list[Any]:
        async with asyncio.timeout(30):
            full: RequestBatcher[int, int] = RequestBatcher(send, max_batch=2, max_wait=60.0)
            found = await asyncio.gather(full.ask(1), full.ask(2))
            waited: RequestBatcher[int, int] = RequestBatcher(send, max_batch=9, max_wait=0.0)
            return [*found, *await asyncio.gather(waited.ask(3), waited.ask(4), waited.ask(5))]

    assert asyncio.run(main()) == [-1, -2, -3, -4, -5]
    assert sent == [[1, 2], [3, 4, 5]]


def test_one_who_leaves_is_left_out_and_the_last_ends_it() -> None:
    sent: list[list[int]] = []
    began, ended = asyncio.Event(), asyncio.Event()

    async def send(items: Any) -> Any:
        sent.append(list(items))
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def main() -> None:
        async with asyncio.timeout(30):
            batches: RequestBatcher[int, int] = RequestBatcher(send, max_batch=3, max_wait=60.0)
            first, second = (asyncio.ensure_future(batches.ask(number)) for number in (1, 2))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            third = asyncio.ensure_future(batches.ask(3))
            await began.wait()
            second.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not ended.is_set()
            third.cancel()
            await ended.wait()

    asyncio.run(main())
    assert sent == [[2, 3]]


def test_closing_ends_what_waits_and_what_is_under_way() -> None:
    async def send(items: Any) -> Any:
        await asyncio.Event().wait()

    async def main() -> list[Any]:
        async with asyncio.timeout(30):
            batches: RequestBatcher[int, int] = RequestBatcher(send, max_batch=2, max_wait=60.0)
            waiting = [asyncio.ensure_future(batches.ask(number)) for number in range(3)]
            await asyncio.sleep(0)
            await batches.close()
            return await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(one) for one in asyncio.run(main())] == [asyncio.CancelledError] * 3
