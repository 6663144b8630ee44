"""Groups that are trained again are drawn alike on every rank, and never exceed the staleness bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from asyncrl_recipes.sample_reuse.extension import Past


def group(number: int, version: int, rewards: tuple[float, float] = (0.0, 1.0)) -> Group:
    def played(reward: float) -> Trajectory:
        return Trajectory([Turn([], Completion([1], [-0.1], [VersionSpan(version, 0, 1)], "stop"))], reward)

    return Group(f"g{number}", number, [12, 11], [played(reward) for reward in rewards], "made")


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_no_group_is_reused_beyond_the_bound_on_any_rank(count, bound, seed, chance) -> None:
    ranks = [Past(count, bound, seed) for _ in range(2)]
    trained: set[str] = set()
    for version in range(12):
        drawn = [past.draw(version) for past in ranks]
        assert drawn[0] == drawn[1]
        assert len(drawn[0]) <= count
        for one in drawn[0]:
            assert one.uid in trained
            assert max(one.staleness(version)) <= bound
        new = [group(4 * version + i, version - chance.randint(0, min(bound, version))) for i in range(2)]
        trained |= {one.uid for one in new}
        for past in ranks:
            past.keep(new)


def test_groups_without_signal_are_not_kept() -> None:
    past = Past(3, max_staleness=2, seed=0)
    past.keep([group(0, 0), group(1, 0, (1.0, 1.0)), group(2, 1)])
    assert {one.uid for one in past.draw(2)} == {"g0", "g2"}
    assert {one.uid for one in past.draw(3)} == {"g2"}
    assert past.draw(4) == []


def test_nothing_is_kept_where_nothing_is_pasted() -> None:
    past = Past(0, max_staleness=8, seed=0)
    past.keep([group(0, 0)])
    assert past.draw(1) == []
