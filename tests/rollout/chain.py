"""An engine whose every next token is a function of all tokens before it; a run over it that is saved and goes on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from asyncrl.rollout import snapshot
from asyncrl.schema import Batch, Prompt, VersionSpan
from tests.fakes import completion, pieces, prompts, stream
from tests.rollout.machinery import EOS, Machinery, RecordedEngine, _extend


class Chain(RecordedEngine):
    """Every next token is a function of all tokens before it: a continuation gives what the whole answer would have."""

    sent = 0

    def _reply(self, request: dict[str, Any]) -> AsyncIterator[bytes]:
        sampling = request["sampling_params"]
        return self._chain(request["input_ids"], sampling["n"], sampling["max_new_tokens"])

    async def _chain(self, prompt: list[int], count: int, most: int) -> AsyncIterator[bytes]:
        written: dict[int, list[int]] = {i: [] for i in range(count)}
        spans: dict[int, list[VersionSpan]] = {i: [] for i in written}
        while written:
            i = self._random.choice(list(written))
            await self._idle()
            await self.serving.wait()
            mine = written[i]
            mine.append(following([*prompt, *mine]))
            _extend(spans[i], self.version, 1)
            self.sent += 1
            reason = "stop" if mine[-1] == EOS else "length" if len(mine) == most else None
            (event,) = pieces(completion(1), i)
            event["output_ids"] = mine[-1:]
            meta = {"finish_reason": None, "output_token_logprobs": [[-0.5, mine[-1], None]]}
            if reason:
                told = [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans[i]]
                meta |= {"finish_reason": {"type": reason}, "weight_versions": told}
                del written[i]
            yield stream([event | {"meta_info": meta}]).removesuffix(b"data: [DONE]\n\n")
        yield b"data: [DONE]\n\n"


def following(sequence: list[int]) -> int:
    digest = hashlib.sha256(bytes(sequence)).digest()
    return EOS if digest[0] < 50 else digest[1] % 10


def machinery(engine: RecordedEngine, drawn: int = 0, kind: type[Machinery] = Machinery, **settings: Any) -> Machinery:
    shape = {"batch_groups": 3, "group_size": 2, "max_staleness": 3, "lead": 2} | settings
    shape["cache_key"] = (
        "group"  # or requests that a publish overtakes would be asked anew, and what had come discarded
    )
    return kind(engine, training=itertools.islice(prompts(), drawn, None), **shape)


def uids(batches: list[Batch]) -> list[list[str]]:
    return [[group.uid for group in batch.groups] for batch in batches]


def answers(batches: list[Batch]) -> dict[str, list[list[int]]]:
    return {
        group.uid: sorted(turn.completion.token_ids for one in group.trajectories for turn in one.turns)
        for batch in batches
        for group in batch.groups
    }


def prompt_of(uid: str) -> Prompt:
    number = int(uid.removeprefix("p"))
    return msgspec.structs.replace(next(itertools.islice(prompts(), number, None)), index=number)


def goes_on(
    seed: int,
    stop: int,
    slack: int,
    running: int | None,
    more: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    after: Callable[[Machinery, int], Callable[[Batch], None]] = lambda made, end: lambda batch: None,
    *,
    dying: bool = False,
) -> None:
    """Check that a run that is saved after some batches and goes on trains every group once, with the tokens that were
    written. `more` are further settings before and after; `after` returns what is called after each batch, until the
    last; `dying` says that tokens may be lost."""
    shape = {"lead": 2, "max_staleness": 2 + slack, "max_running": running}
    whole = machinery(Chain(seed), **shape).batches(8)
    engine = Chain(seed + 1)
    first = machinery(engine, **shape, **more[0])
    before, saved = first.snapshot(stop, after(first, stop))
    state = snapshot.decode(saved).service

    again = Chain(seed + 2)
    again.version = stop
    resumed = machinery(again, drawn=state.drawn, **shape, **more[1])
    resumed.go_on(saved, prompt_of)
    then = resumed.batches(8 - stop, after(resumed, 8))

    assert [batch.version for batch in before + then] == list(range(8))
    trained = [uid for batch in uids(before + then) for uid in batch]
    assert len(set(trained)) == len(trained) == 8 * 3
    for batch in before + then:  # what a resumed answer is depends on nothing but its prompt
        assert max(age for group in batch.groups for age in group.staleness(batch.version)) <= 2 + slack
    both = answers(before + then)
    for uid, mine in answers(whole).items():
        if uid in both:
            assert both[uid] == mine
    if not slack:  # batches are cohorts, whatever the timing
        assert uids(before + then) == uids(whole)
    ledger = resumed.groups.ledger()
    assert (ledger.groups.trained, ledger.groups.rejected) == (8 * 3, {})
    if dying:
        return
    # every token that had come is in the snapshot, and every one of these is trained or waits to be
    received = sum(sibling.received for one in state.outstanding for sibling in one.siblings)
    said = [said.completion for one in state.outstanding for sibling in one.siblings for said in sibling.said]
    assert sum(len(completion.token_ids) for completion in said) == received
    assert ledger.tokens.discarded == 0
