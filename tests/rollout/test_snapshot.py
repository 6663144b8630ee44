"""The rollout side, saved at one instant and gone on from: nothing lost, nothing twice, the bound kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from functools import cache

import httpx
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.engine.session import PartialAnswer, Request
from asyncrl.engine.stream import StreamChunk
from asyncrl.errors import RecordError
from asyncrl.rollout import snapshot
from asyncrl.schema import Completion, Exchange, Generate, Prompt, Trajectory, Turn, VersionSpan
from tests.engine.resuming import resumed
from tests.examples import examples
from tests.fakes import FakeEngine
from tests.rollout.chain import Chain, goes_on, machinery, prompt_of, uids
from tests.rollout.machinery import EOS, KEY
from tests.rollout.schedules import Run, schedules


@settings(deadline=None, max_examples=examples(12))
@given(
    seed=st.integers(0, 2**32),
    stop=st.integers(1, 4),
    slack=st.integers(0, 2),
    running=st.sampled_from([None, 2]),
)
def test_resumed_run_trains_every_group_once_as_written(seed: int, stop: int, slack: int, running: int | None) -> None:
    goes_on(seed, stop, slack, running)


class Turns:
    """Three turns; the environment says `words` in between."""

    def __init__(self, words: list[int]) -> None:
        self.words = words

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        context, turns = list(prompt.token_ids), []
        for number in range(3):
            observation = self.words if number else []
            answer = await generate([*context, *observation])
            turns.append(Turn(observation, answer))
            context += [*observation, *answer.token_ids]
        return Trajectory(turns)


@settings(deadline=None, max_examples=examples(8))
@given(seed=st.integers(0, 2**32), same=st.booleans())
def test_agents_of_many_turns_are_told_again_what_they_were_told(seed: int, same: bool) -> None:
    """If the environment answers differently the second time, what was generated for nothing is discarded."""
    first = machinery(Chain(seed), agent=Turns([7, 7]))
    before, saved = first.snapshot(2)
    state = snapshot.decode(saved).service
    again = Chain(seed + 1)
    again.version = 2
    resumed = machinery(again, drawn=state.drawn, agent=Turns([7, 7] if same else [8, 9]))
    resumed.go_on(saved, prompt_of)
    batches = before + resumed.batches(4)
    assert len({uid for batch in uids(batches) for uid in batch}) == 6 * 3
    for batch in batches:
        assert max(age for group in batch.groups for age in group.staleness(batch.version)) <= 3
    ledger = resumed.groups.ledger()  # in balance
    said = [said for one in state.outstanding for sibling in one.siblings for said in sibling.said]
    assert (ledger.tokens.discarded == 0) or not same
    if any(7 in one.context[3:] for one in said) and not same:
        assert ledger.tokens.discarded + ledger.tokens.running > 0


@settings(deadline=None, max_examples=50)
@given(schedules(Run))
def test_saved_and_restored_buffer_has_the_same_schedule(run: Run) -> None:
    same = {name: getattr(run, name) for name in run.__dataclass_fields__ if name not in ("batches", "births", "trace")}
    one, other = Run(**{**same, "saves": False}).play(), Run(**{**same, "saves": True}).play()
    assert (one.trace, one.batches, one.births) == (other.trace, other.batches, other.births)


def test_snapshot_between_a_batch_and_its_version_is_refused() -> None:
    site = machinery(Chain(0))

    async def play() -> None:
        transport = httpx.ASGITransport(app=site.server.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=KEY) as source:
            working = asyncio.create_task(site.worker.run())
            assert (await source.post("/snapshot", json={"version": 0})).status_code == 200
            assert (await source.post("/snapshot", json={"version": 1})).status_code == 409
            while (await source.get("/batch", params={"version": 0})).status_code == 202:
                pass
            answer = await source.post("/snapshot", json={"version": 0})
            assert answer.status_code == 409
            assert "version 0 is not the newest, or its batch has begun" in answer.text
            working.cancel()
        await site.client.close()

    asyncio.run(asyncio.wait_for(play(), 120))


def test_work_under_way_is_told_with_its_oldest_version() -> None:
    session = FakeEngine(lambda request: b"").client().generate()
    request = Request(session, [1, 2], 8)
    request.live = live = PartialAnswer(request, asked_at=7)
    live.add(
        msgspec.convert({"output_ids": [4, 5], "meta_info": {"output_token_logprobs": [[-0.1, 4, None]]}}, StreamChunk)
    )
    said = request.so_far()
    assert said == Completion([4], [-0.1], [VersionSpan(7, 0, 1, inferred=True)], "")
    assert live.token_ids == [4, 5]  # looking changes nothing
    again = PartialAnswer.recalled(request, said)
    assert (again.cut, again.spans(), again.token_ids) == ("the run was resumed", said.versions, [4])


def test_recalled_answers_are_given_once_to_their_question() -> None:
    client = FakeEngine(lambda request: b"").client()
    told = Exchange([1, 2], Completion([3, EOS], [-0.1, -0.2], [VersionSpan(0, 0, 2)], "stop"))
    session = resumed(client, "g", "g 0", 0, 2, [told])
    assert session.recall(Request(session, [1], 9)) is None
    assert session.said() == [told]  # not asked for yet: the next checkpoint holds it, too
    assert session.recall(Request(session, [1, 2], 9)) == told.completion
    assert session.recall(Request(session, [1, 2], 9)) is None
    assert (session.received, session.said()) == (2, [])


@settings(deadline=None, max_examples=examples(50))
@given(data=st.data())
def test_damaged_snapshots_are_refused_or_have_the_shape(data: st.DataObject) -> None:
    saved = bytearray(_saved())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(saved) - 1)))
        match data.draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip" if saved:
                saved[place] = data.draw(st.integers(0, 255))
            case "cut":
                del saved[place:]
            case _:
                saved[place:place] = data.draw(st.binary(max_size=8))
    with contextlib.suppress(RecordError):
        snapshot.encode(snapshot.decode(bytes(saved)))


@cache
def _saved() -> bytes:
    """Return a snapshot with groups under way and ready groups."""
    snapshots = (machinery(Chain(seed)).snapshot(2)[1] for seed in itertools.count())
    return next(one for one in snapshots if snapshot.decode(one).service.buffer.ready)


def test_whoever_is_restored_is_what_was_saved() -> None:
    """A snapshot of what was made from a snapshot is that snapshot."""
    whole = snapshot.decode(_saved())
    again = machinery(Chain(0), drawn=whole.service.drawn)
    again.go_on(_saved(), prompt_of)
    service = again.groups.state()
    for field in ("drawn", "samples", "retried", "reported", "tokens", "late"):
        assert getattr(service, field) == getattr(whole.service, field), field
    told = [[(s.received, s.said) for s in one.siblings] for one in service.outstanding]
    assert told == [[(s.received, s.said) for s in one.siblings] for one in whole.service.outstanding]


def test_snapshot_holds_what_was_being_played_and_what_was_ready() -> None:
    state = snapshot.decode(_saved()).service
    assert state.buffer.running
    assert state.drawn == len(state.buffer.running) + len(state.buffer.ready) + 2 * 3
