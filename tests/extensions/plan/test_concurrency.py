"""The concurrency rule is as fast as the best fixed number in very different worlds, which are simulated."""

from __future__ import annotations

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import Setting, SimulatedEpisode, SimulatedWorkload, SimulationResult, simulate

SIZE, BATCH = 8, 16


def answers(mean: float, **changes: float) -> Lengths:
    return Lengths(mean, 0.9, 7 * round(mean), SIZE, **changes)  # type: ignore[arg-type]


def growing(number: int) -> list[SimulatedEpisode]:
    """Answers that are eight times as long in the second half of the run."""
    return (answers(200) if number < 10 * BATCH else answers(1600)).group(number)


FAST, SLOW = 1e6, 700.0
WORLDS = {
    "small caches": (answers(1000).episodes(), 4, FAST, 12_000),
    "answers grow": (growing, 4, FAST, 12_000),
    "caches for all": (answers(1000).episodes(), 4, FAST, 1_000_000),
    "slow tools": (answers(1000, turns=6, tool_seconds=4.0).episodes(), 4, FAST, 20_000),
    "long contexts": (answers(400, turns=8, tool_seconds=2.0).episodes(), 4, FAST, 100_000),
    "slow trainer": (answers(1000).episodes(), 6, SLOW, 1_000_000),
}


def played(world: str, in_play: int | None) -> SimulationResult:
    episodes, bound, rate, kv_tokens = WORLDS[world]
    prompt = 3000 if world == "long contexts" else 100
    shape = EngineShape(0.01, 0.0005, 64, kv_tokens, 5_000.0)
    setting = Setting(2, rate, bound, in_play=in_play, pause=1.0, shape=shape)
    return simulate(SimulatedWorkload(episodes, BATCH, prompt=prompt, longest=12_000), setting, 12, warm=6)


FIXED = (0, 64, 256)
"""Episodes at once; 0: as many as the buffer admits."""


def test_limiter_is_as_fast_as_the_best_fixed_number() -> None:
    found = {world: played(world, None) for world in WORLDS}
    fixed = {world: [played(world, number) for number in FIXED] for world in WORLDS}
    shares = {world: found[world].tokens_per_s / max(one.tokens_per_s for one in fixed[world]) for world in WORLDS}
    assert min(shares.values()) > 0.93, shares
    assert max(shares.values()) > 1.05, shares
    assert sum(shares.values()) > 0.98 * len(WORLDS), shares
    for number in range(len(FIXED)):
        worst = min(fixed[world][number].tokens_per_s / found[world].tokens_per_s for world in WORLDS)
        assert worst < 0.85, f"{FIXED[number]} at once are as good everywhere"
    for world in WORLDS:
        everything = fixed[world][0]
        assert found[world].prefilled <= everything.prefilled
        assert found[world].staleness_mean < everything.staleness_mean + 0.1
