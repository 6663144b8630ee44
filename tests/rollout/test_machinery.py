"""Client, worker, buffer and service together, under thousands of random timings: what reaches the trainer."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.metrics.record import StepLog
from asyncrl.schema import Batch, VersionSpan
from tests.examples import examples
from tests.rollout.machinery import (
    STEPS,
    Machinery,
    RecordedEngine,
    Timing,
    machinery,
    plain,
    same_bytes,
    shapes,
    timings,
    without_versions,
)


@given(timings, shapes)
@settings(max_examples=examples(25))
def test_bound_0_is_a_plain_synchronous_driver_bytewise(timing, shape) -> None:
    """I5: ids, log-probabilities, rewards, versions and their order."""
    found = machinery(timing, **shape, max_staleness=0).batches(STEPS)
    assert same_bytes([batch.groups for batch in found], plain(**shape))


@given(timings, shapes, st.integers(1, 4), st.booleans())
@settings(max_examples=examples(25))
def test_without_slack_timing_shows_in_the_versions_alone(timing, shape, bound: int, overlap: bool) -> None:
    """I7: batch t is cohort t."""
    found = machinery(timing, **shape, max_staleness=bound, overlap=overlap).batches(STEPS)
    expected = plain(**shape)
    assert [without_versions(batch.groups) for batch in found] == [without_versions(groups) for groups in expected]


@given(timings, shapes, st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.0, 0.3]), st.booleans())
@settings(max_examples=examples(50))
def test_tokens_are_labelled_by_the_engine_for_any_timing(
    timing, shape, lead: int, slack: int, fails: float, overlap: bool
) -> None:
    """I1, I3, I4: labels are those of the engine's own books; no prompt is trained twice; nothing is unaccounted."""
    made = machinery(timing, fails, **shape, max_staleness=lead + slack, lead=lead, overlap=overlap)
    found = made.batches(STEPS)
    asked = [tuple(group.prompt_ids) for batch in found for group in batch.groups]
    assert len(set(asked)) == len(asked) == STEPS * shape["batch_groups"]
    for batch in found:
        for group in batch.groups:
            spans = [trajectory.turns[0].completion.versions for trajectory in group.trajectories]
            assert spans == made.engine.wrote[tuple(group.prompt_ids)]
            for one in spans:
                assert all(before.version < after.version for before, after in pairwise(one))
            assert all(0 <= age <= lead + slack for age in group.staleness(batch.version))
    made.groups.ledger()


def test_timings_make_answers_old_mixed_refused_and_late() -> None:
    """Without this the properties above would mean little."""
    seen: set[str] = set()
    for seed in range(20):
        made = machinery(
            Timing(seed, 25, None, "version", "in_place"), 0.2, batch_groups=2, group_size=2, max_staleness=2
        )
        late: list[Batch] = made.batches(STEPS)
        ages = {age for batch in late for group in batch.groups for age in group.staleness(batch.version)}
        spans = [t.turns[0].completion.versions for batch in late for group in batch.groups for t in group.trajectories]
        seen |= {f"age {age}" for age in ages} | ({"mixed"} if max(map(len, spans)) > 1 else set())
        seen |= {"refused"} if made.groups.ledger().groups.rejected.get("engine") else set()
        seen |= {"overtaken"} if made.overtaken else set()
    assert seen >= {"age 0", "age 1", "age 2", "mixed", "refused", "overtaken"}


@pytest.mark.parametrize("cache_key", ["version", "group"])
@pytest.mark.parametrize("publishes", [1, 2, 3])
def test_late_answer_keeps_the_version_that_wrote_it(publishes: int, cache_key: str) -> None:
    """The version comes from the engine's label, through client and buffer, and not from the time of arrival."""

    class Late(RecordedEngine):
        async def _arrive(self, prompt: list[int], *, last: bool) -> None:
            while last and prompt == [12, publishes, 11] and made.client.inflight.version < publishes:  # noqa: ASYNC110
                await asyncio.sleep(0)

    made = Machinery(Late(0, jitter=0), batch_groups=1, group_size=1, max_staleness=3, cache_key=cache_key)
    log = StepLog([], started_at=time.time())
    for batch in made.batches(publishes + 1):
        for name in ("train", "publish"):
            with log.span(name):
                pass
        log.step(batch.version + 1, batch, {}, dict.fromkeys(("pause", "verify", "engines", "bytes"), 0.0))
    (group,) = batch.groups
    answer = group.trajectories[0].turns[0].completion
    assert answer.versions == [VersionSpan(0, 0, len(answer.token_ids))]
    assert (log.steps[-1]["staleness/mean"], log.steps[-1]["staleness/max"]) == (publishes, publishes)
    assert log.steps[-1]["requests/overtaken"] == 0
