"""The rollout process's HTTP service around a real buffer."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import LedgerError
from asyncrl.network.ports import free_ports
from asyncrl.observability import intervals
from asyncrl.observability.intervals import PUBLISH, QUEUED, REWARD, TOOL
from asyncrl.observability.timeline import BatchTimeline, GroupTimeline, PublishTimeline
from asyncrl.rollout import groups as groups_module
from asyncrl.rollout import server as module
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.ledger import Ledger, TokenCounts
from asyncrl.rollout.serving import serve
from asyncrl.schema import decode_batch
from tests.rollout.service import Site, at


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)


def test_an_error_of_the_rollouts_closes_all_connections() -> None:
    """Those that stay open report, below the error in the log, that the event loop is closed."""
    (port,) = free_ports("127.0.0.1", 1)

    async def main(site: Site) -> None:
        connected = asyncio.Event()

        async def roll_out() -> None:
            await connected.wait()
            raise RuntimeError("of the rollouts")

        url = f"http://127.0.0.1:{port}"
        serving = asyncio.create_task(serve(site.server, url, roll_out(), None))
        while True:  # until the server listens
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n")
        connected.set()
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await serving
        with contextlib.suppress(ConnectionResetError):
            await reader.read()  # until the connection ends
        writer.close()

    at(main)


def test_batches_and_versions_alternate() -> None:
    async def play(site: Site) -> None:
        for version in range(3):
            await site.fill(2)
            answer = await site.http.get("/batch", params={"version": version})
            assert answer.status_code == 200
            batch = decode_batch(answer.content)
            assert batch.version == version
            assert [one.slot for one in batch.groups] == [2 * version, 2 * version + 1]
            assert (await site.http.post("/hold")).status_code == 200
            assert (await site.http.post("/version", json={"version": version + 1})).status_code == 200
        assert site.client.calls == ["hold", 1, "hold", 2, "hold", 3]
        status = (await site.http.get("/status")).json()
        assert (status["version"], status["ledger"]["groups"]["trained"]) == (3, 6)
        assert {status["ledger"][kind]["issued"] for kind in ("groups", "prompts")} == {6}
        assert "step 3 needs 2 ready groups" in status["waiting_for"]

    at(play, bound=0)


def test_batch_that_is_not_ready_is_202_with_what_it_waits_for() -> None:
    async def play(site: Site) -> None:
        await site.fill(1)
        answer = await site.http.get("/batch", params={"version": 0})
        assert answer.status_code == 202
        assert answer.text.startswith("step 0 needs 2 ready groups, but has 1")
        await site.fill(1)  # nothing was lost by asking
        assert (await site.http.get("/batch", params={"version": 0})).status_code == 200

    at(play)


def test_batch_wakes_with_the_commit_that_completes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 60.0)

    async def play(site: Site) -> None:
        asking = asyncio.create_task(site.http.get("/batch", params={"version": 0}))
        await site.fill(1)
        await asyncio.sleep(0.02)
        assert not asking.done()
        await site.fill(1)
        assert (await asking).status_code == 200

    at(play)


@pytest.mark.parametrize("version", [0, 3])
def test_any_version_but_the_next_and_the_one_in_training_is_409(version: int) -> None:
    async def play(site: Site) -> None:
        await site.fill(4)
        await site.http.get("/batch", params={"version": 0})
        await site.http.post("/version", json={"version": 1})
        await site.http.get("/batch", params={"version": 1})
        answer = await site.http.get("/batch", params={"version": version})
        assert (answer.status_code, answer.text) == (409, f"batch {version} was requested, but the next one is 2")

    at(play)


def test_parts_are_handed_out_as_soon_as_they_are_ready() -> None:
    async def play(site: Site) -> None:
        async def asked(part: int, version: int = 0) -> Any:
            return await site.http.get("/batch", params={"version": version, "part": part, "parts": 2})

        tickets = [await site.groups.ticket() for _ in range(2)]
        await site.play(tickets[1])
        first = await asked(0)
        assert (decode_batch(first.content).last, decode_batch(first.content).rollout) == (False, {})
        assert [one.slot for one in decode_batch(first.content).groups] == [1]
        assert (await asked(1)).status_code == 202
        assert not site.groups.between_batches(0)  # no checkpoint within a batch
        assert (await site.http.post("/snapshot", json={"version": 0})).status_code == 409
        await site.play(tickets[0])
        last = await asked(1)
        assert decode_batch(last.content).last
        assert "groups/running" in decode_batch(last.content).rollout
        assert [one.slot for one in decode_batch(last.content).groups] == [0]
        assert [(await asked(part)).content for part in (0, 1)] == [first.content, last.content]
        assert (await asked(0, version=1)).status_code == 202
        assert (await site.http.post("/version", json={"version": 1})).status_code == 200
        assert site.groups.ledger().groups.trained == 2
        assert (await asked(1, version=1)).text == "part 1 of batch 1 was requested, but the next one is 0"
        assert (await asked(2)).status_code == 400

    at(play)


@pytest.mark.parametrize("parts", [1, 2])
def test_batch_can_be_had_during_the_publish_before_it(parts: int) -> None:
    """weights.overlap. The older batch can be read again until its version is published, the newer one longer."""

    async def play(site: Site) -> None:
        async def asked(version: int) -> list[Any]:
            parameters = [{"version": version, "part": part, "parts": parts} for part in range(parts)]
            return [await site.http.get("/batch", params=one) for one in parameters]

        def slots(answers: list[Any]) -> list[int]:
            assert {answer.status_code for answer in answers} == {200}
            return [one.slot for answer in answers for one in decode_batch(answer.content).groups]

        await site.fill(6)
        old = await asked(0)
        assert (await site.http.post("/hold")).status_code == 200
        new = await asked(1)
        assert (slots(old), slots(new)) == ([0, 1], [2, 3])
        assert [one.content for one in (*await asked(0), *await asked(1))] == [one.content for one in (*old, *new)]
        assert (await asked(2))[0].status_code == 202  # two versions ahead
        assert (await asked(3))[0].status_code == 409
        assert (await site.http.post("/snapshot", json={"version": 0})).status_code == 409
        ledger = site.groups.ledger()
        assert (ledger.groups.training, ledger.groups.trained, ledger.groups.ready) == (4, 0, 2)
        assert (await site.http.post("/version", json={"version": 1})).status_code == 200
        assert (await site.http.post("/version", json={"version": 1})).status_code == 200  # to engines that restarted
        ledger = site.groups.ledger()
        assert (ledger.groups.training, ledger.groups.trained) == (2, 2)
        assert (await site.http.get("/status")).json()["batch"] == 1
        assert (await asked(0))[0].status_code == 409
        assert [one.content for one in await asked(1)] == [one.content for one in new]
        assert not site.groups.between_batches(1)
        assert slots(await asked(2)) == [4, 5]
        for version in (2, 3):
            assert (await site.http.post("/version", json={"version": version})).status_code == 200
        assert site.groups.between_batches(3)
        assert site.groups.ledger().groups.trained == 6

    at(play, bound=2, overlap=True)


def test_part_of_the_next_batch_outlives_a_publish() -> None:
    async def play(site: Site) -> None:
        await site.fill(4)
        await site.http.get("/batch", params={"version": 0})
        first = await site.http.get("/batch", params={"version": 1, "part": 0, "parts": 2})
        assert (await site.http.post("/version", json={"version": 1})).status_code == 200
        again = await site.http.get("/batch", params={"version": 1, "part": 0, "parts": 2})
        assert again.content == first.content
        assert not site.groups.between_batches(1)
        last = await site.http.get("/batch", params={"version": 1, "part": 1, "parts": 2})
        assert [decode_batch(one.content).groups[0].slot for one in (first, last)] == [2, 3]

    at(play, overlap=True)


def test_every_request_gets_the_same_bytes_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 60.0)

    async def play(site: Site) -> None:
        asking = [asyncio.create_task(site.http.get("/batch", params={"version": 0})) for _ in range(3)]
        await asyncio.sleep(0.01)
        await site.fill(4)  # they wait together: one batch for all of them
        answers = [await one for one in asking]
        assert [one.status_code for one in answers] == [200] * 3
        assert len({one.content for one in answers}) == 1
        status = (await site.http.get("/status")).json()
        assert status["batch"] == 0
        assert status["ledger"]["groups"]["training"] == 2
        late = await site.http.get("/batch", params={"version": 0})
        assert late.content == answers[0].content
        await site.http.post("/version", json={"version": 1})
        assert (await site.http.get("/status")).json()["batch"] is None
        assert (await site.http.get("/batch", params={"version": 0})).status_code == 409

    at(play)


def test_one_batch_at_most_is_encoded_ahead() -> None:
    """However long the trainer takes: nothing piles up."""

    async def play(site: Site) -> None:
        while (ticket := site.groups._buffer.admit()) is not None:
            await site.play(ticket)
        assert (await site.http.get("/batch", params={"version": 0})).status_code == 200
        for _ in range(3):
            assert (await site.http.get("/batch", params={"version": 1})).status_code == 202
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(site.groups.ticket(), 0.05)
        ledger = site.groups.ledger()
        assert (ledger.groups.training, ledger.groups.ready, ledger.groups.issued) == (2, 4, 6)  # (lead + 1) batches
        assert (await site.http.get("/status")).json()["batch"] == 0

    at(play, bound=2)


def test_ready_group_that_loses_its_place_is_not_trained() -> None:
    """over_age=drop moves seats to newer cohorts; one with too many has ready groups left when it is due."""

    async def play(site: Site) -> None:
        async def step(version: int, *finished: int) -> list[int]:
            while (ticket := site.groups._buffer.admit()) is not None:
                tickets[ticket.slot] = ticket
            for slot in finished:
                await site.play(tickets.pop(slot))
            data = (await site.http.get("/batch", params={"version": version})).content
            for ticket, reason in await asyncio.wait_for(site.groups.unwanted(), 30) if version == 0 else []:
                await site.play(tickets.pop(ticket.slot), reject=reason)
            assert (await site.http.post("/version", json={"version": version + 1})).status_code == 200
            return [one.slot for one in decode_batch(data).groups]

        tickets: dict[int, Ticket] = {}
        assert await step(0, 2, 3) == [2, 3]  # in place of cohort 0, whose seats go to cohort 2
        assert await step(1, 8, 9) == [8, 9]  # of cohort 3
        assert await step(2, 4, 5, 6, 7) == [4, 5]
        ledger = site.groups.ledger()
        assert ledger.groups.rejected == {"over_age": 4}
        assert ledger.tokens.rejected == 2 * 4 + 2 * 4

    at(play, bound=2, over_age="drop", select=lambda ready, count: ready[-count:])


# --- the ledger stops what it does not understand -------------------------------------------------------------


def break_a_count(site: Site, kind: str) -> None:
    """A prompt that reaches no group, a token that none has, a trajectory that is gone, a group that stands twice."""
    if kind == "prompts":
        site.groups.draw(lambda: next(site.prompts))
    elif kind == "tokens":
        site.client.tokens["training"] += 3
    elif kind == "trajectories":
        site.groups._buffer.books.issued["trajectories"] += 2
    else:
        site.groups._buffer.books.trained["groups"] += 1


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("prompts", "the ledger of prompts does not balance: issued 3, but .* = 2: 1 lost"),
        ("groups", "the ledger of groups does not balance: issued 2, but .* = 3: 1 counted twice"),
        ("trajectories", "the ledger of trajectories does not balance: issued 6, but .* = 4: 2 lost"),
        ("tokens", "the ledger of tokens does not balance: generated 11, but .* = 8: 3 lost"),
    ],
)
def test_broken_count_stops_the_run_with_the_difference(kind: str, text: str) -> None:
    async def play(site: Site) -> None:
        failing = asyncio.create_task(site.server.fail())
        await site.fill(2)
        await site.http.get("/batch", params={"version": 0})
        break_a_count(site, kind)
        answer = await site.http.post("/version", json={"version": 1})
        assert answer.status_code == 500
        assert re.fullmatch(text, answer.text)
        with pytest.raises(LedgerError, match=text):
            await failing
        assert site.published == []

    at(play)


def test_ledger_is_checked_at_ends_of_groups_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(site: Site) -> None:
        checks = 0
        found = site.groups.ledger

        def counted() -> Ledger:
            nonlocal checks
            checks += 1
            return found()

        monkeypatch.setattr(site.groups, "ledger", counted)
        monkeypatch.setattr(groups_module, "CHECK_SECONDS", 600.0)  # however long the groups take
        while (ticket := site.groups._buffer.admit()) is not None:
            await site.play(ticket)
        assert checks <= 1
        site.groups._checked -= 2 * 600.0
        break_a_count(site, "tokens")
        await site.http.get("/batch", params={"version": 0})
        with pytest.raises(LedgerError):
            found()

    at(play, bound=500)


def test_running_and_late_tokens_are_accounted_for() -> None:
    async def play(site: Site) -> None:
        ticket = await site.groups.ticket()
        sessions = site.begin(ticket)
        for tokens in (3, 4):
            site.receive(sessions[0], tokens)
            site.groups.ledger()
        assert site.groups.ledger().tokens == TokenCounts(generated=7, running=7)
        await site.groups.reject(ticket, "judge")
        assert site.groups.ledger().tokens == TokenCounts(generated=7, rejected=7)
        site.client.tokens["training"] += 2  # a piece that was on its way: engine/inflight.py
        site.client.late_tokens += 2
        site.receive(site.client.generate(purpose="evaluation"), 5)
        site.client.tokens["past"] += 4  # of a role that a past version plays
        assert site.groups.ledger().tokens == TokenCounts(generated=9, rejected=7, discarded=2)
        assert site.groups.ledger().events.evaluation_tokens == 5
        assert site.groups.ledger().events.past_tokens == 4
        assert site.groups.ledger().prompts.rejected == {"judge": 1}
        assert site.groups.ledger().trajectories.rejected == {"judge": 2}

    at(play)


def test_wait_for_a_batch_names_groups_and_their_doings(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    for using in (intervals, groups_module):
        monkeypatch.setattr(using, "time", SimpleNamespace(time=time.time, monotonic=lambda: now))

    async def play(site: Site) -> None:
        sessions = [site.begin(await site.groups.ticket()) for _ in range(4)]
        for number, age, phase, name in [(0, 10.0, TOOL, "search"), (1, 63.0, REWARD, ""), (2, 500.0, QUEUED, PUBLISH)]:
            site.receive(sessions[number][0], 7)
            sessions[number][0].activity.begin(phase, name)
            sessions[number][0].activity.since -= age
            sessions[number][1].activity.finish()
        text = (await site.http.get("/batch", params={"version": 0})).text
        first = "g00000001a0000: 1 of 2 episodes left, 7 tokens, waits 63 s for its reward"
        second = "g00000000a0000: 1 of 2 episodes left, 7 tokens, waits 10 s for its tool search"
        assert text.endswith(f"{first}; {second}")  # the groups that are due, not those of a later batch
        assert (await site.http.get("/status")).json()["waiting_for"] == text

    at(play)


def test_timelines_say_which_group_a_batch_waited_for() -> None:
    async def play(site: Site) -> None:
        tickets = [await site.groups.ticket() for _ in range(4)]
        await site.play(tickets[3], reject="judge")
        await site.play(tickets[0], tokens=3)
        assert (await site.http.get("/batch", params={"version": 0})).status_code == 202
        await asyncio.sleep(0.05)
        await site.play(tickets[1])
        assert (await site.http.get("/batch", params={"version": 0})).status_code == 200
        site.client.held = 5.0
        assert (await site.http.post("/version", json={"version": 1})).status_code == 200
        await site.play(tickets[2])
        await site.play(await site.groups.ticket())
        await site.http.get("/batch", params={"version": 1})
        groups = [record for record in site.records if isinstance(record, GroupTimeline)]
        assert [(one.slot, one.outcome, one.born) for one in groups[:3]] == [
            (3, "judge", 0),
            (0, "committed", 0),
            (1, "committed", 0),
        ]
        assert [one.reward for one in groups[0].episodes] == [None, None]
        assert [one.tokens for one in groups[1].episodes] == [3, 3]
        assert all(one.admitted <= one.ended for one in groups)
        first, second = [record for record in site.records if isinstance(record, BatchTimeline)]
        assert (first.step, first.uids, first.last) == (0, [tickets[0].uid, tickets[1].uid], tickets[1].uid)
        assert first.taken - first.asked >= 0.04
        assert (second.step, second.last, second.asked) == (1, "", second.taken)
        (published,) = [record for record in site.records if isinstance(record, PublishTimeline)]
        assert (published.version, published.held) == (1, 5.0)
        site.client.held = 6.0  # for engines that came later
        assert (await site.http.post("/version", json={"version": 1})).status_code == 200
        assert [record for record in site.records if isinstance(record, PublishTimeline)] == [published]

    at(play)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/batch?version=0"),
        ("POST", "/hold"),
        ("POST", "/version"),
        ("POST", "/evaluate"),
        ("GET", "/status"),
        ("GET", "/health"),
    ],
)
def test_without_the_key_everything_is_401_and_nothing_happens(method: str, path: str) -> None:
    async def play(site: Site) -> None:
        await site.fill(2)
        for headers in ({"authorization": ""}, {"authorization": "Bearer key1"}, {"authorization": "key0"}):
            assert (await site.http.request(method, path, headers=headers, json={})).status_code == 401
        assert site.client.calls == []
        assert site.evaluations.asked == []
        assert (await site.http.get("/status")).json()["ledger"]["groups"]["ready"] == 2

    at(play)


def test_publish_and_rejection_admit_who_waits() -> None:
    async def play(site: Site) -> None:
        first, second = await site.groups.ticket(), await site.groups.ticket()
        waiting = asyncio.create_task(site.groups.ticket())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await site.play(first, reject="judge")
        replacement = await waiting
        assert (replacement.slot, replacement.cohort) == (2, first.cohort)
        for ticket in (replacement, second):
            await site.play(ticket)
        waiting = asyncio.create_task(site.groups.ticket())
        await site.http.get("/batch", params={"version": 0})
        assert not waiting.done()
        await site.http.post("/version", json={"version": 1})
        assert (await waiting).slot == 3

    at(play, bound=0)


def test_same_version_again_lets_requests_go_and_trains_nothing() -> None:
    async def play(site: Site) -> None:
        await site.http.post("/hold")
        assert (await site.http.post("/version", json={"version": 0})).status_code == 200
        assert site.client.calls == ["hold", 0]
        assert (await site.http.get("/status")).json()["version"] == 0

    at(play)


def test_figures_cover_commits_since_the_last_batch() -> None:
    async def play(site: Site) -> None:
        found = []
        for version in range(2):
            await site.fill(3 if version == 0 else 2)
            ticket = await site.groups.ticket()
            await site.play(ticket, reject="judge")
            answer = await site.http.get("/batch", params={"version": version})
            found.append(decode_batch(answer.content).rollout)
            await site.http.post("/version", json={"version": version + 1})
        assert [one["samples/generated"] for one in found] == [6, 4]
        assert [one["tokens/generated"] for one in found] == [16, 12]
        assert [one["groups/ready"] for one in found] == [1, 1]
        assert [one["groups/rejected"] for one in found] == [1, 2]
        assert found[0]["prefix_cache/hit"] == 0.25
        assert found[0]["time/engine_busy"] == 0.5

    at(play)


def test_evaluation_that_lasts_is_asked_for_again() -> None:
    async def play(site: Site) -> None:
        site.evaluations.ends.clear()
        assert (await site.http.post("/evaluate")).status_code == 202
        site.evaluations.ends.set()
        assert (await site.http.post("/evaluate")).json() == [{"accuracy": 0.5}]

    at(play)


def test_evaluation_runs_on_request_and_hears_of_versions() -> None:
    async def play(site: Site) -> None:
        assert (await site.http.post("/evaluate")).json() == [{"accuracy": 0.5}]
        for version in range(2):
            await site.fill(2)
            await site.http.get("/batch", params={"version": version})
            await site.http.post("/version", json={"version": version + 1})
            await site.http.post("/version", json={"version": version + 1})  # weights were sent anew
        assert site.evaluations.asked == ["now", 1, 2]

    at(play, bound=0)


def test_hold_in_a_drain_answers_only_once_nothing_is_in_flight() -> None:
    async def play(site: Site) -> None:
        site.client.in_flight = 3
        assert (await site.http.post("/hold")).status_code == 202
        assert site.client.calls == ["hold"]
        site.client.in_flight = 0
        assert (await site.http.post("/hold")).status_code == 200

    at(play, drain=True)


def test_every_version_leaves_its_ledger() -> None:
    async def play(site: Site) -> None:
        for version in range(3):
            await site.fill()
            assert (await site.http.get("/batch", params={"version": version})).status_code == 200
            assert (await site.http.post("/version", json={"version": version + 1})).status_code == 200
        assert [(one["version"], one["groups"]["trained"]) for one in site.published] == [(1, 2), (2, 4), (3, 6)]

    at(play)


class Told(ConcurrencyLimiter):
    """Limiter that keeps what it is told of batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, bool]] = []

    def taken(self, ready: int, batch: int, *, waited: bool) -> None:
        self.batches.append((ready, batch, waited))


def test_room_hears_of_every_batch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(site: Site) -> None:
        monkeypatch.setattr(module, "POLL_SECONDS", 60.0)
        site.groups._limiter = limiter = Told()
        await site.fill(4)
        await site.http.get("/batch", params={"version": 0})
        await site.http.get("/batch", params={"version": 0})  # the same bytes again
        assert limiter.batches == [(2, 2, False)]
        await site.http.post("/version", json={"version": 1})
        await site.http.get("/batch", params={"version": 1})
        await site.http.post("/version", json={"version": 2})
        asking = asyncio.ensure_future(site.http.get("/batch", params={"version": 2}))
        await asyncio.sleep(0.01)
        await site.fill(2)
        assert (await asking).status_code == 200
        assert limiter.batches == [(2, 2, False), (0, 2, False), (0, 2, True)]

    at(play)
