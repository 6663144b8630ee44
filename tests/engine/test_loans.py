"""A wait is worth a loan if it is long enough for the hand-overs, whether that was expected or not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.loans import LATEST, PAYS, TRIALS, LoanRule


def measured(cost: float = 4.0) -> LoanRule:
    """Return a rule that knows what a loan costs, and expects no wait."""
    rule = LoanRule()
    for _ in range(TRIALS):
        rule.ended(0.0, cost)
    return rule


def test_the_first_loans_begin_at_once_and_measure_what_one_costs() -> None:
    rule = LoanRule()
    for _ in range(TRIALS):
        assert rule.due(0.0)
        rule.ended(0.0, 4.0)
    assert not rule.due(0.0)
    assert rule.due(PAYS * 4.0)


def test_a_loan_that_took_unusually_long_does_not_prevent_the_next() -> None:
    rule = LoanRule()
    rule.ended(0.0, 300.0)  # the first one allocates host memory
    rule.ended(0.0, 4.0)
    assert rule.due(PAYS * 4.0)
    rule.ended(0.0, 300.0)
    assert rule.due(PAYS * 4.0)


def test_a_loan_begins_at_once_only_while_the_latest_waits_were_long_enough() -> None:
    rule = measured()
    for _ in range(LATEST):
        rule.ended(PAYS * 4.0, 4.0)
    assert rule.due(0.0)
    for _ in range(LATEST):
        rule.ended(1.0, None)
    assert not rule.due(PAYS * 4.0 - 0.1)


@given(waits=st.lists(st.floats(0.0, 7.9), min_size=1, max_size=20))
def test_short_waits_are_never_prolonged(waits: list[float]) -> None:
    rule = measured()
    for wait in waits:
        assert not rule.due(wait)
        rule.ended(wait, None)
