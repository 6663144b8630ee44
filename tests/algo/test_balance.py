"""Samples over ranks and micro-batches: nothing lost, nothing over the limit, and as even as it goes."""

from __future__ import annotations

import heapq
import os
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algo.balance import Costs, assign_micro_batches, measure, micro_batches, partition
from asyncrl.algo.pack import pack
from asyncrl.algo.samples import Sample
from tests.algo.packs import Groups, packs
from tests.examples import examples

COSTS = Costs(pair=3000, row=200_000)
costs_lists = st.lists(st.integers(0, 10**9), max_size=40)


def numbered(groups: Groups) -> Groups:
    """Every sample with a number of its own."""
    found, number = [], 0
    for group in groups:
        found.append([Sample(s.prompt_ids, s.token_ids, s.mask, number + i, 0) for i, s in enumerate(group)])
        number += len(group)
    return found


def loads(shares: list[list[int]], costs: list[int]) -> list[int]:
    return [sum(costs[i] for i in share) for share in shares]


# --- ranks --------------------------------------------------------------------------------------------------


@given(costs_lists, st.integers(1, 9))
def test_balance_is_complete_and_within_grahams_bound(costs: list[int], ranks: int) -> None:
    shares = partition(costs, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(costs)))
    largest, total = max(costs, default=0), sum(costs)
    assert max(loads(shares, costs)) <= total / ranks + largest * (1 - 1 / ranks)
    best = max(largest, -(-total // ranks))
    assert 3 * max(loads(shares, costs)) <= 4 * best or len(costs) > ranks  # trivially even where items are few


@given(costs_lists, st.integers(1, 9), st.randoms(use_true_random=False))
def test_loads_do_not_depend_on_the_order_of_items(costs: list[int], ranks: int, rng: random.Random) -> None:
    shuffled = list(costs)
    rng.shuffle(shuffled)
    one, other = loads(partition(costs, ranks), costs), loads(partition(shuffled, ranks), shuffled)
    assert max(one) == max(other)


def karmarkar_karp(costs: list[int], ranks: int) -> int:
    """The largest load by the largest differencing method (Karmarkar and Karp 1982), for many ranks: the two partial
    partitions that differ most become one, the largest loads of one with the smallest of the other."""
    heap = [(-cost, i, [cost] + [0] * (ranks - 1)) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    number, base = len(heap), 0
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        both = sorted((a + b for a, b in zip(one, reversed(other), strict=True)), reverse=True)
        base += both[-1]
        both = [load - both[-1] for load in both]
        heapq.heappush(heap, (-both[0], number, both))
        number += 1
    return heap[0][2][0] + base


@pytest.mark.parametrize(("items", "ranks"), [(16, 4), (64, 8), (64, 16), (256, 32)])
def test_imbalance_is_below_karmarkar_karps(items: int, ranks: int) -> None:
    rng = random.Random(items + ranks)
    ours, theirs = 0.0, 0.0
    for _ in range(10):
        costs = [int(1e6 * rng.lognormvariate(0, 0.7)) for _ in range(items)]
        fair = sum(costs) / ranks
        ours += max(loads(partition(costs, ranks), costs)) / fair - 1
        theirs += karmarkar_karp(costs, ranks) / fair - 1
    assert ours <= 1.05 * theirs


@pytest.mark.slow
def test_balancing_1e5_samples_over_1000_ranks_is_fast() -> None:
    rng = random.Random(0)
    costs = [int(1e6 * rng.lognormvariate(0, 1)) for _ in range(100_000)]
    started = time.process_time()
    shares = partition(costs, 1024)
    assert time.process_time() - started < 2.0  # 0.4 s on a quiet core
    assert max(loads(shares, costs)) <= 1.0001 * sum(costs) / 1024


# --- pieces -------------------------------------------------------------------------------------------------


@given(packs())
@settings(max_examples=examples(80))
def test_what_is_measured_is_what_a_pack_of_the_group_holds(case: tuple) -> None:
    groups, share, _ = case
    for group in groups:
        if any(s.num_inputs for s in group):
            piece, p = measure(group, COSTS, share), pack([group], share=share)
            assert piece.tokens == p.num_tokens
            pairs = int(p.positions.sum()) + p.num_tokens
            assert piece.cost == (p.num_tokens << 20) + pairs * COSTS.pair + len(p.targets) * COSTS.row
    whole = pack(groups, share=share)
    assert whole.num_tokens <= sum(measure(g, COSTS, share).tokens for g in groups)


@given(packs(), st.integers(1, 5), st.integers(5, 90), st.booleans(), st.integers(1, 3))
@settings(max_examples=examples(80))
def test_every_sample_is_in_one_micro_batch_within_the_limit(
    case: tuple, ranks: int, limit: int, equal: bool, rounds: int
) -> None:
    groups, share, _ = case
    groups = numbered(groups)
    found = assign_micro_batches(groups, ranks, limit, COSTS, share=share, equal=equal, rounds=rounds)
    numbers = [s.number for rank in found for batch in rank for group in batch for s in group]
    assert sorted(numbers) == [s.number for group in groups for s in group]
    assert len(found) == ranks
    counts = {len(rank) for rank in found}
    assert 0 not in counts
    assert all(count % rounds == 0 for count in counts)
    assert not equal or len(counts) == 1
    for batch in (batch for rank in found for batch in rank):
        running = [s for group in batch for s in group if s.num_inputs]
        if len(running) > 1:
            assert pack(batch, share=share).num_tokens <= limit
        for group in batch:
            assert len({tuple(s.prompt_ids) for s in group}) == 1


def test_siblings_stay_together_unless_a_rank_would_wait() -> None:
    def group(first: int, siblings: int, length: int) -> list[Sample]:
        return [Sample([first] * 20, [i] * length, [True] * length, first * 100 + i, 0) for i in range(siblings)]

    even = [group(g, 4, 10) for g in range(8)]
    assert sorted(len(g) for rank in assign_micro_batches(even, 2, 10_000, COSTS) for b in rank for g in b) == [4] * 8
    one_large = [group(0, 16, 50), *(group(g, 4, 1) for g in range(1, 3))]
    cut = [
        sum(len(g) for b in rank for g in b if g[0].prompt_ids[0] == 0)
        for rank in assign_micro_batches(one_large, 2, 10_000, COSTS)
    ]
    assert sum(cut) == 16
    assert min(cut) >= 4


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(20, 80), st.integers(0, 6))
def test_micro_batches_are_even_within_the_limit(sizes: list[int], limit: int, count: int) -> None:
    pieces = [measure([Sample([0] * size, [1], [True], i, 0)], COSTS) for i, size in enumerate(sizes)]
    found = micro_batches(pieces, limit, count)
    assert len(found) >= count
    assert sorted(p.samples[0].number for batch in found for p in batch) == list(range(len(sizes)))
    assert all(len(batch) == 1 or sum(p.tokens for p in batch) <= limit for batch in found)
    spent = [sum(p.cost for p in batch) for batch in found]
    assert spent == sorted(spent, reverse=True)


HASHED = """
import random
from asyncrl.algo.balance import Costs, assign_micro_batches
from asyncrl.algo.samples import Sample
rng = random.Random(1)
groups = []
for i in range(30):
    prompt = [i] * rng.randint(1, 9)
    lengths = [rng.randint(1, 40) for _ in range(4)]
    groups.append([Sample(prompt, [j % 2] * n, [True] * n, 4 * i + j, 0) for j, n in enumerate(lengths)])
ranks = assign_micro_batches(groups, 4, 100, Costs(30, 7))
print([[[[s.number for s in g] for g in b] for b in rank] for rank in ranks])
"""


def test_result_does_not_depend_on_the_hash_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """This process has another one, drawn at its start."""
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", HASHED], env=env, capture_output=True, text=True, check=True)
    exec(HASHED, {})
    assert capsys.readouterr().out == done.stdout != ""
