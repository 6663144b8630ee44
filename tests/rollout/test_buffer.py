"""The cohort rule under random schedules: bounded, conserved, live, and in order where it says so."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollout.buffer import CohortBuffer, Ticket
from asyncrl.schema import Group
from tests.examples import examples
from tests.fakes import group
from tests.rollout.schedules import Run, schedules


@given(schedules(Run))
@settings(max_examples=examples(50))
def test_every_schedule_keeps_bound_and_ledger_and_ends(run: Run) -> None:
    run.play()
    trained = [slot for batch in run.batches for slot in batch]
    assert len(trained) == len(set(trained)) == run.steps * run.batch_groups
    assert all(batch == sorted(batch) for batch in run.batches)


@given(schedules(Run))
@settings(max_examples=examples(50))
def test_step_leaves_nothing_of_the_cohort_due(run: Run) -> None:
    run.play()
    trained: set[int] = set()
    for step, batch in enumerate(run.batches):
        trained |= set(batch)
        assert {slot for slot, cohort in run.cohorts.items() if cohort <= step - run.slack} <= trained


@given(schedules(Run, parts=st.booleans()))
@settings(max_examples=examples(50))
def test_without_slack_batches_do_not_depend_on_completion_order(run: Run) -> None:
    run.slack, run.rejections = 0, 0.0
    run.__post_init__()
    size = run.batch_groups
    batches = [sorted(batch) for batch in run.play().batches]
    assert batches == [list(range(t * size, (t + 1) * size)) for t in range(run.steps)]


@given(schedules(Run, parts=st.booleans()))
@settings(max_examples=examples(50))
def test_bound_0_batches_ignore_the_completion_order(run: Run) -> None:
    """Batch t is made of the first slots, not in earlier batches, that are not rejected."""
    run.lead = run.slack = 0
    run.rejects = lambda slot: random.Random(f"{run.seed} {slot}").random() < run.rejections
    run.__post_init__()
    kept = (slot for slot in itertools.count() if not run.rejects(slot))
    expected = [list(itertools.islice(kept, run.batch_groups)) for _ in range(run.steps)]
    assert [sorted(batch) for batch in run.play().batches] == expected


@given(schedules(Run))
@settings(max_examples=examples(50))
def test_bound_0_is_synchronous(run: Run) -> None:
    run.lead = run.slack = 0
    run.__post_init__()
    run.play()
    assert run.births == [[step] * run.batch_groups for step in range(run.steps)]
    while "publish" in run.trace:  # a step: play all, then train; nothing overlaps
        here = run.trace.index("publish")
        assert run.trace[here - 1] == "take"
        assert "take" not in run.trace[: here - 1]
        assert run.trace[: here - 1].count("admit") == run.trace[: here - 1].count("finish") >= run.batch_groups
        run.trace = run.trace[here + 1 :]


@given(schedules(Run, moves=st.just(True)))
@settings(max_examples=examples(60))
def test_invariants_hold_whenever_the_lead_changes(run: Run) -> None:
    """`Run` checks the age of every group, the ledger at every event, and that something can always happen."""
    run.play()
    trained = [slot for batch in run.batches for slot in batch]
    assert len(trained) == len(set(trained)) == run.steps * run.batch_groups


@given(schedules(Run, parts=st.just(True), moves=st.booleans()))
@settings(max_examples=examples(60))
def test_invariants_hold_for_batches_in_parts(run: Run) -> None:
    run.play()
    trained: set[int] = set()
    for step, batch in enumerate(run.batches):
        trained |= set(batch)
        due = {slot for slot, cohort in run.cohorts.items() if cohort <= step - run.slack}
        assert run.moves or due <= trained
    assert len(trained) == run.steps * run.batch_groups


@given(schedules(Run, parts=st.booleans(), moves=st.booleans()))
@settings(max_examples=examples(60))
def test_invariants_hold_for_batches_during_publishes(run: Run) -> None:
    """`Run` publishes at any moment, and saves the buffer at versions whose batch is not begun."""
    run.overlap = True
    run.__post_init__()
    run.play()
    taken = [slot for batch in run.batches for slot in batch]
    assert len(taken) == len(set(taken)) == run.steps * run.batch_groups


def test_one_batch_is_taken_ahead_of_its_version() -> None:
    buffer = CohortBuffer(2, 2, overlap=True)
    while ticket := buffer.admit():
        buffer.commit(ticket, group(ticket.slot))
    assert [one.slot for one in buffer.take() or []] == [0, 1]
    assert [one.slot for one in buffer.take(1) or []] == [2]  # version 1 is being published
    buffer.publish(1)
    assert (buffer.books.places()["groups"].training, buffer.books.places()["groups"].trained) == (1, 2)
    with pytest.raises(ValueError, match="version 2 published after version 1, 1 batches taken"):
        buffer.publish(2)  # a part of its batch is not taken
    assert [one.slot for one in buffer.take() or []] == [3]
    assert [one.slot for one in buffer.training] == [2, 3]
    assert [one.slot for one in buffer.take() or []] == [4, 5]
    assert buffer.take() is None  # two versions ahead
    assert (buffer.version, buffer.step, buffer.books.places()["groups"].training) == (1, 3, 4)
    for version in (2, 3):
        buffer.publish(version)
    assert (buffer.books.places()["groups"].training, buffer.books.places()["groups"].trained) == (0, 6)


def test_without_a_lead_nothing_is_taken_ahead() -> None:
    buffer = CohortBuffer(1, 3, 0, overlap=True)
    ticket = buffer.admit()
    assert ticket
    buffer.commit(ticket, group(ticket.slot))
    assert buffer.take()
    assert buffer.admit() is None
    assert buffer.take() is None


def test_part_of_a_batch_leaves_room_for_what_is_due() -> None:
    buffer = CohortBuffer(2, 2, 1)
    tickets = [ticket for ticket in iter(buffer.admit, None) if ticket]
    for ticket in tickets[1:]:
        buffer.commit(ticket, group(ticket.slot))
    assert [one.slot for one in buffer.take() or []] == [1, 2]  # slot 0 may be overtaken once
    buffer.publish(1)
    assert [one.slot for one in buffer.take(1) or []] == [3]  # the other place is for slot 0
    while ticket := buffer.admit():
        buffer.commit(ticket, group(ticket.slot))
    assert buffer.take(1) is None
    assert (buffer.step, len(buffer.training)) == (1, 1)
    buffer.commit(tickets[0], group(0))
    assert [one.slot for one in buffer.take(1) or []] == [0]
    assert (buffer.step, len(buffer.training)) == (2, 2)


@pytest.mark.parametrize(("first", "then"), [(3, 0), (0, 3), (2, 1), (1, 3)])
def test_changed_lead_admits_as_if_from_the_start(first: int, then: int) -> None:
    changed, plain = CohortBuffer(2, 3, first), CohortBuffer(2, 3, then)
    for step in range(10):
        if step == 2:
            changed.change_lead(then)
        for buffer in (changed, plain):
            while ticket := buffer.admit():
                buffer.commit(ticket, group(ticket.slot))
            assert buffer.take() is not None
            buffer.publish(step + 1)
    assert (changed.lead, changed.slack) == (then, 3 - then)
    while ticket := changed.admit():
        changed.commit(ticket, group(ticket.slot))
    while ticket := plain.admit():
        plain.commit(ticket, group(ticket.slot))
    assert changed.ready == plain.ready == 2 * (then + 1)
    with pytest.raises(ValueError, match="lead 4 is not between 0 and max_staleness 3"):
        changed.change_lead(4)


def test_higher_lead_waits_for_stragglers_due_in_the_past() -> None:
    buffer = CohortBuffer(2, 3, 1)
    straggler = buffer.admit()
    assert straggler is not None
    while ticket := buffer.admit():
        buffer.commit(ticket, group(ticket.slot))
    assert [one.slot for one in buffer.take() or []] == [1, 2]
    buffer.publish(1)
    buffer.change_lead(3)
    assert buffer.lead == 2  # the straggler is due now; with lead 3 it would have been due at step 0
    while ticket := buffer.admit():
        buffer.commit(ticket, group(ticket.slot))
    assert buffer.take() is None
    buffer.commit(straggler, group(straggler.slot))
    assert [one.slot for one in buffer.take() or []] == [0, 3]
    buffer.publish(2)
    assert buffer.lead == 3


def ready_first(straggler: int, batch_groups: int, lead: int, steps: int) -> int:
    """Steps that AReaL's rule takes while one slot still runs: the admission of here, but any ready groups go."""
    ready: set[int] = set()
    admitted = 0
    for step in range(steps):
        while admitted < (lead + step + 1) * batch_groups:
            if admitted != straggler:
                ready.add(admitted)
            admitted += 1
        if len(ready) < batch_groups:
            return step
        ready -= set(sorted(ready)[:batch_groups])
    return steps


@pytest.mark.parametrize(("lead", "slack"), [(1, 0), (2, 2), (4, 1), (1, 5)])
def test_straggler_is_overtaken_for_slack_steps_only(lead: int, slack: int) -> None:
    size = 3
    assert ready_first(0, size, lead, steps=500) == 500  # the counter-example: overtaken for ever
    buffer = CohortBuffer(size, lead + slack, lead)
    straggler = buffer.admit()
    assert straggler is not None
    for step in range(slack):
        while ticket := buffer.admit():
            buffer.commit(ticket, group(ticket.slot))
        assert buffer.take() is not None
        buffer.publish(step + 1)
    while ticket := buffer.admit():
        buffer.commit(ticket, group(ticket.slot))
    assert buffer.take() is None
    assert f"due but not ready: slots [{straggler.slot}]" in buffer.waiting_for()
    buffer.commit(straggler, group(straggler.slot))
    taken = buffer.take()
    assert taken is not None
    assert taken[0].slot == straggler.slot


def test_admission_stops_at_the_lead() -> None:
    buffer = CohortBuffer(2, 3, 1)
    tickets = [buffer.admit() for _ in range(4)]
    assert None not in tickets
    assert buffer.admit() is None
    for ticket in tickets:
        assert ticket is not None
        buffer.commit(ticket, group(ticket.slot))
    assert buffer.admit() is None  # ready groups hold their slots
    buffer.take()
    assert buffer.admit() is None  # so do groups in training
    buffer.publish(1)
    assert [ticket.slot for ticket in (buffer.admit(), buffer.admit()) if ticket] == [4, 5]
    assert buffer.admit() is None


def test_no_batch_waits_for_a_replacement_of_the_newest_cohort() -> None:
    buffer = CohortBuffer(2, 1)
    tickets = [ticket for _ in range(4) if (ticket := buffer.admit())]
    buffer.reject(tickets[0], "no_signal")
    late = buffer.admit()
    assert late == Ticket(slot=4, born=0, cohort=1)
    assert buffer.books.ledger(0, {}, 0, 0).events.requeued == 1
    assert buffer.admit() is None  # as many as before are under way
    for ticket in tickets[1:3]:
        buffer.commit(ticket, group(ticket.slot))
    assert [one.slot for one in buffer.take() or []] == [1, 2]
    buffer.publish(1)
    assert [ticket.cohort for ticket in (buffer.admit(), buffer.admit()) if ticket] == [2, 2]
    buffer.commit(tickets[3], group(3))
    assert buffer.take() is None
    assert "due but not ready: slots [4]" in buffer.waiting_for()  # its own bound holds
    buffer.commit(late, group(4))
    assert [one.slot for one in buffer.take() or []] == [3, 4]


def test_step_waits_for_a_cohort_larger_than_a_batch() -> None:
    buffer = CohortBuffer(1, 3, 2)

    def step(slot: int) -> None:
        taken = buffer.take()
        assert [one.slot for one in taken or []] == [slot]
        buffer.publish(buffer.version + 1)

    first, second, third = [ticket for _ in range(3) if (ticket := buffer.admit())]
    buffer.commit(first, group(0))
    step(0)
    buffer.reject(second, "no_signal")
    fourth, fifth = buffer.admit(), buffer.admit()
    assert fourth
    assert fifth
    assert (fourth.cohort, fifth.cohort) == (3, 3)  # both are due at step 4, which takes one
    buffer.commit(third, group(2))
    step(2)
    for slot in (5, 6):  # younger groups overtake them once
        younger = buffer.admit()
        assert younger
        buffer.commit(younger, group(slot))
        if slot == 5:
            step(5)
    assert buffer.take() is None
    assert buffer.awaited() == 3
    buffer.commit(fifth, group(4))
    step(4)


def test_ending_a_ticket_that_does_not_run_is_refused() -> None:
    buffer = CohortBuffer(1, 1)
    ticket = buffer.admit()
    assert ticket is not None
    buffer.commit(ticket, group(0))
    for close in (lambda t: buffer.commit(t, group(0)), lambda t: buffer.reject(t, "late")):
        with pytest.raises(ValueError, match="is not running"):
            close(ticket)


def test_overdue_commit_does_not_evict_its_replacement() -> None:
    buffer = CohortBuffer(1, 0)
    other = buffer.admit()
    assert other is not None
    buffer.reject(other, "judge")
    replacement = buffer.admit()
    assert replacement is not None
    with pytest.raises(ValueError, match="is not running"):
        buffer.commit(other, group(0))
    buffer.commit(replacement, group(1))
    assert buffer.books.places()["groups"].ready == 1


def test_one_batch_at_a_time_and_its_version_is_published() -> None:
    buffer = CohortBuffer(1, 1)
    with pytest.raises(ValueError, match="version 1 published after version 0, 0 batches taken"):
        buffer.publish(1)
    for _ in range(2):
        ticket = buffer.admit()
        assert ticket is not None
        buffer.commit(ticket, group(ticket.slot))
    taken = buffer.take()
    assert [one.slot for one in taken or []] == [0]
    assert buffer.take() is None
    for version in (0, 2):
        with pytest.raises(ValueError, match=f"version {version} published"):
            buffer.publish(version)
    buffer.publish(1)
    assert [one.slot for one in buffer.take() or []] == [1]


def test_lead_above_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="lead 3 exceeds max_staleness 2"):
        CohortBuffer(4, 2, 3)
    assert (CohortBuffer(4, 2).lead, CohortBuffer(4, 2).slack) == (2, 0)


def test_waiting_for_names_what_is_missing_and_for_how_long() -> None:
    now = 100.0
    buffer = CohortBuffer(2, 0, clock=lambda: now)
    first, _ = buffer.admit(), buffer.admit()
    assert first is not None
    now = 130.0
    buffer.commit(first, group(0))
    text = buffer.waiting_for()
    assert "step 0 needs 2 ready groups, but has 1" in text
    assert "slots [1]" in text
    assert "1 running, the oldest for 30 s" in text


def test_trained_slots_that_nobody_asks_for_again_are_forgotten() -> None:
    run = Run(2, 1, 3, steps=200).play()
    assert len(run.buffer._cohorts) <= run.bound + 2


def test_batch_is_a_list_of_whole_groups() -> None:
    buffer = CohortBuffer(1, 0)
    ticket = buffer.admit()
    assert ticket is not None
    committed: Group = group(0)
    buffer.commit(ticket, committed)
    assert buffer.take() == [committed]
