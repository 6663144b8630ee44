"""An equation that does not hold is named, with both sides and the difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import LedgerError
from asyncrl.rollout.ledger import Ledger, StateCounts, TokenCounts

counts = st.integers(0, 50)


@st.composite
def balanced(draw: st.DrawFn) -> Ledger:
    def places() -> StateCounts:
        parts = [draw(counts) for _ in range(4)]
        rejected = draw(st.dictionaries(st.sampled_from(["judge", "surplus", "agent_timeout"]), counts))
        return StateCounts(sum(parts) + sum(rejected.values()), *parts, rejected)

    tokens = [draw(counts) for _ in range(5)]
    return Ledger(places(), places(), places(), TokenCounts(sum(tokens), *tokens))


@given(
    balanced(),
    st.sampled_from(["prompts", "groups", "trajectories", "tokens"]),
    st.integers(0, 4),
    st.integers(-40, 40).filter(bool),
)
def test_any_wrong_count_is_found_with_its_equation(ledger: Ledger, kind: str, place: int, by: int) -> None:
    ledger.check()
    book = getattr(ledger, kind)
    field = [name for name in book.__dataclass_fields__ if name != "rejected" or kind == "tokens"][place]
    broken = replace(ledger, **{kind: replace(book, **{field: getattr(book, field) + by})})
    with pytest.raises(LedgerError) as caught:
        broken.check()
    lost = (by > 0) == (field in ("issued", "generated"))
    assert f"the ledger of {kind} does not balance" in str(caught.value)
    assert str(caught.value).endswith(f"{abs(by)} lost" if lost else f"{abs(by)} counted twice")


def test_both_sides_are_told_with_the_reasons_of_rejections() -> None:
    places = StateCounts(12, 4, 2, 1, 3, {"judge": 1})
    with pytest.raises(LedgerError) as caught:
        Ledger(places, StateCounts(), StateCounts(), TokenCounts()).check()
    assert str(caught.value) == (
        "the ledger of prompts does not balance: issued 12, but running 4 + ready 2 + training 1 + trained 3 + "
        "rejected (judge) 1 = 11: 1 lost"
    )
