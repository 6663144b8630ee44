"""Opt-in filters: groups that are discarded, and groups that a hook selects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.buffer import OVER_AGE, SURPLUS, CohortBuffer, Ticket
from asyncrl.schema import Group
from tests.examples import examples
from tests.fakes import group
from tests.rollout.schedules import Run, schedules


@dataclass
class Wasteful(Run):
    """The same books, where groups may be thrown away."""

    def _finish(self, slow: bool = False) -> bool:
        for ticket, reason in self.buffer.unwanted():
            self.running.remove(ticket)
            self._reject(ticket, reason)
        return super()._finish(slow)

    def _check(self) -> None:
        ledger = self._ledger()
        assert ledger.groups.running == len(self.running)
        assert ledger.groups.trained == self.books["trained"]
        assert ledger.prompts == ledger.groups
        assert ledger.groups.ready + ledger.groups.training <= (self.lead + 1) * self.batch_groups

    def _take(self) -> bool:
        step = self.buffer.step
        if step == self.steps or (groups := self.buffer.take()) is None:
            return False
        assert len(groups) == self.batch_groups
        for one in groups:
            assert all(0 <= age <= self.bound for age in one.staleness(step)), (step, one)
        self.batches.append([one.slot for one in groups])
        self._note_taken(step, groups)
        return True


wasteful = schedules(
    Wasteful,
    oversample=st.sampled_from([0, 1, 4]),
    over_age=st.sampled_from(["wait", "drop"]),
    picky=st.booleans(),
    moves=st.booleans(),
)


@given(wasteful)
@settings(max_examples=examples(100))
def test_dropped_or_chosen_groups_break_no_invariant(run: Wasteful) -> None:
    run.play()
    trained = [slot for batch in run.batches for slot in batch]
    assert len(set(trained)) == len(trained) == run.steps * run.batch_groups


def admitted(buffer: CohortBuffer) -> list[Ticket]:
    return list(iter(buffer.admit, None))


def test_seats_of_a_cohort_go_to_the_first_that_end() -> None:
    buffer = CohortBuffer(2, 0, oversample=2)
    tickets = admitted(buffer)
    assert len(tickets) == 4
    buffer.commit(tickets[3], group(3))
    assert buffer.unwanted() == []
    buffer.reject(tickets[0], "judge")
    assert buffer.admit() is None  # two still play for the one seat that is left
    buffer.commit(tickets[1], group(1))
    assert buffer.unwanted() == [(tickets[2], SURPLUS)]
    assert buffer.unwanted() == []
    buffer.commit(tickets[2], group(2, tokens=5))  # it ended before it could be stopped
    assert buffer.books.places()["groups"].rejected == {"judge": 1, SURPLUS: 1}
    assert buffer.books.ledger(0, {}, 0, 0).tokens.rejected == 10
    taken = buffer.take()
    assert taken is not None
    assert [one.slot for one in taken] == [1, 3]


def test_batch_leaves_a_straggler_whose_seat_moves() -> None:
    buffer = CohortBuffer(2, 1, 1, over_age="drop")
    tickets = admitted(buffer)
    for ticket in tickets[1:3]:
        buffer.commit(ticket, group(ticket.slot))
    taken = buffer.take()  # cohort 0 is due: slot 0 still runs, slot 2 takes its place
    assert taken is not None
    assert [one.slot for one in taken] == [1, 2]
    assert buffer.unwanted() == [(tickets[0], OVER_AGE)]
    buffer.reject(tickets[0], OVER_AGE, tokens=7)
    assert [ticket.cohort for ticket in admitted(buffer)] == [1]  # as many as before are under way
    buffer.publish(1)
    assert [ticket.cohort for ticket in admitted(buffer)] == [2, 2]
    assert buffer.books.places()["groups"].rejected == {OVER_AGE: 1}


def test_group_of_a_dropped_cohort_that_ends_late_is_over_age() -> None:
    buffer = CohortBuffer(1, 1, 1, over_age="drop")
    first, second = admitted(buffer)
    buffer.commit(second, group(1))
    buffer.take()
    buffer.commit(first, group(0))
    assert buffer.books.places()["groups"].rejected == {OVER_AGE: 1}


def test_ready_groups_too_many_for_a_batch_give_their_seats_on() -> None:
    """A seat that moved makes a cohort larger than a batch, and all of it ends in the step in which it is due."""
    buffer = CohortBuffer(1, 3, 2, over_age="drop")
    ends = [[1], [2], [5], [6], [3, 4, 7]]  # slots by step; slot 0 never does, and its seat moves to cohort 3
    tickets, trained = dict[int, Ticket](), list[list[int]]()
    for step in range(5):
        if step:
            buffer.publish(step)
        tickets |= {ticket.slot: ticket for ticket in admitted(buffer)}
        for slot in ends[step]:
            buffer.commit(tickets[slot], group(slot))
        trained.append([one.slot for one in buffer.take() or []])
    assert [tickets[slot].cohort for slot in (3, 4, 7)] == [3, 3, 6]
    assert trained == [[1], [2], [5], [6], [3]]
    assert buffer.books.places()["groups"].rejected == {OVER_AGE: 1}  # slot 4
    assert [(ticket.slot, ticket.cohort) for ticket in admitted(buffer)] == [(8, 6)]


def test_hook_chooses_only_among_what_need_not_go_yet() -> None:
    seen: list[tuple[list[int], int]] = []

    def last(ready: Sequence[Group], count: int) -> Sequence[Group]:
        seen.append(([one.slot for one in ready], count))
        return ready[-count:]

    buffer = CohortBuffer(2, 2, 1, select=last)
    for ticket in admitted(buffer):
        buffer.commit(ticket, group(ticket.slot))
    first = buffer.take()
    assert first is not None
    assert [one.slot for one in first] == [2, 3]
    buffer.publish(1)
    for ticket in admitted(buffer):
        buffer.commit(ticket, group(ticket.slot))
    second = buffer.take()
    assert second is not None
    assert [one.slot for one in second] == [0, 1]  # due: the hook is not even asked
    assert seen == [([0, 1, 2, 3], 2)]


def test_hook_that_chooses_too_few_is_told() -> None:
    buffer = CohortBuffer(2, 2, 1, select=lambda ready, count: ready[:1])
    for ticket in admitted(buffer):
        buffer.commit(ticket, group(ticket.slot))
    with pytest.raises(ValueError, match="select must choose 2 of the ready slots"):
        buffer.take()
