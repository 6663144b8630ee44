"""The examples of results/plans.md are what asyncrl-plan says now, as far as the laws tell."""

from __future__ import annotations

import pytest

from scripts.plans import EXAMPLES, disagreements

LARGE = "qwen3_235b_a22b"


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != LARGE])
def test_documented_plans_are_those_of_the_laws_now(name: str) -> None:
    """python scripts/plans.py writes them anew."""
    assert disagreements(name) == []


@pytest.mark.campaign
def test_documented_plan_of_the_largest_model_is_current() -> None:
    assert disagreements(LARGE) == []
