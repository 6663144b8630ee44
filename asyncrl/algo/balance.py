"""Load balancing of samples over data-parallel ranks and micro-batches, by cost. Pure: every rank computes the whole
assignment.

A piece is a group or a part of one: siblings stay together, because their shared prefixes then run once. A group is cut
if it holds more tokens than a micro-batch, or if it alone costs more than a rank's fair share. Costs are integers, so
that rounding cannot differ between ranks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.algo.pack import common_beginning, tree_segments
from asyncrl.algo.samples import Sample

TOKEN = 1 << 20
"""Cost of a token's products with all weights: the unit of cost."""
GAIN = 0.8
"""A group is cut for balance if its more expensive half costs at most this fraction of it: both halves repeat what they
share."""

EXCHANGES, PARTNERS = 3, 8  # maximum exchanges per rank; number of least loaded ranks that are tried


@dataclass(frozen=True)
class Costs:
    """Costs of one forward and backward pass, in units where a token's weight products cost TOKEN."""

    pair: int = 0  # a token that attends to one other
    row: int = 0  # a predicted token: the products with the vocabulary


@dataclass(frozen=True)
class SampleCluster:
    """Siblings that run together."""

    samples: list[Sample]
    tokens: int  # in a pack that holds only this piece
    cost: int


Groups = list[list[Sample]]


def assign_micro_batches(
    groups: Sequence[list[Sample]],
    ranks: int,
    limit: int,
    costs: Costs,
    *,
    share: bool = True,
    equal: bool = False,
    rounds: int = 1,
) -> list[list[Groups]]:
    """Return the micro-batches of each rank, most expensive first, each with at most `limit` tokens (a larger sample
    runs alone).

    Each rank gets as many as it needs, at least one, rounded up to a multiple of `rounds`. With `equal`, every rank
    gets as many as the rank with the most. Some may be empty.
    """
    pieces = _pieces(groups, ranks, limit, costs, share)
    mine = [[pieces[i] for i in rank] for rank in partition([piece.cost for piece in pieces], ranks)]
    batches = [micro_batches(rank, limit) for rank in mine]
    most = max(map(len, batches))
    for rank, found in enumerate(batches):
        count = max(1, most if equal else len(found))
        count += -count % rounds
        if count > len(found):
            batches[rank] = micro_batches(mine[rank], limit, count)
    return [[[piece.samples for piece in batch] for batch in found] for found in batches]


# --- pieces -------------------------------------------------------------------------------------------------


def measure(samples: list[Sample], costs: Costs, share: bool = True) -> SampleCluster:
    """Build one piece, with its samples ordered so that those with longer common prefixes are neighbors. Prefixes
    shared with other groups are not known here, so the counts are upper limits."""
    samples = sorted(samples, key=_tokens) if share else samples
    running = [sample for sample in samples if sample.num_inputs]
    lengths = [sample.num_inputs for sample in running]
    rows = sum(sample.num_trained for sample in running)
    if not share or len(running) < 2:
        tokens, pairs = sum(lengths), sum(map(_pairs, lengths))
    else:
        common = [
            min(n, m, len(a.prompt_ids) + common_beginning(a.token_ids, b.token_ids))
            for (n, a), (m, b) in pairwise(zip(lengths, running, strict=True))
        ]
        tree = tree_segments(lengths, common)
        tokens = sum(s.stop - s.start for s in tree)
        pairs = sum(_pairs(s.stop) - _pairs(s.start) for s in tree)
    return SampleCluster(samples, tokens, tokens * TOKEN + pairs * costs.pair + rows * costs.row)


def _pairs(length: int) -> int:
    """Return the number of pairs of a token and one at or before it."""
    return length * (length + 1) // 2


def _pieces(groups: Sequence[list[Sample]], ranks: int, limit: int, costs: Costs, share: bool) -> list[SampleCluster]:
    """Return the groups, cut where necessary: first for the token limit, then for balance."""
    pieces: list[SampleCluster] = []
    for group in groups:
        if share:
            pieces += _within(group, limit, costs)
        else:
            pieces += [measure([sample], costs, share=False) for sample in group]
    fair = -(-sum(piece.cost for piece in pieces) // ranks)
    found: list[SampleCluster] = []
    while pieces:
        piece = pieces.pop()
        halves = _halves(piece, costs) if piece.cost > fair and len(piece.samples) > 1 else []
        if halves and max(half.cost for half in halves) <= GAIN * piece.cost:
            pieces += halves
        else:
            found.append(piece)
    return found


def _tokens(sample: Sample) -> list[int]:
    return sample.token_ids[: sample.num_inputs - len(sample.prompt_ids)] if sample.num_inputs else []


def _within(samples: list[Sample], limit: int, costs: Costs) -> list[SampleCluster]:
    """Cut into as few pieces of neighbors as the limit allows, in equal parts."""
    whole = measure(samples, costs)
    if whole.tokens <= limit or len(samples) == 1:
        return [whole]
    parts = min(len(samples), -(-whole.tokens // limit))
    bounds = [len(samples) * part // parts for part in range(parts + 1)]
    return [piece for a, b in pairwise(bounds) for piece in _within(whole.samples[a:b], limit, costs)]


def _halves(piece: SampleCluster, costs: Costs) -> list[SampleCluster]:
    middle = len(piece.samples) // 2
    return [measure(part, costs) for part in (piece.samples[:middle], piece.samples[middle:])]


# --- ranks --------------------------------------------------------------------------------------------------


def partition(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Assign items to ranks: the most expensive first, each to the least loaded rank (Graham's LPT). Then exchange
    items between the most loaded rank and one of the least loaded, as long as the maximum falls."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(heap)
        shares[rank].append(item)
        heapq.heappush(heap, (load + costs[item], rank))
    _exchange(shares, costs)
    return shares


def _exchange(shares: list[list[int]], costs: Sequence[int]) -> None:
    """Exchange items in place. After each exchange both ranks are below the previous maximum load."""
    loads = [sum(costs[item] for item in share) for share in shares]
    for _ in range(EXCHANGES * len(shares)):
        most = loads.index(max(loads))
        for other in heapq.nsmallest(PARTNERS, range(len(shares)), key=loads.__getitem__):
            gap = loads[most] - loads[other]
            swap = _best_swap([costs[i] for i in shares[most]], [costs[i] for i in shares[other]], gap)
            if swap is not None:
                break
        else:
            return
        given = shares[most].pop(swap[0])
        taken = [] if swap[1] is None else [shares[other].pop(swap[1])]
        shares[most] += taken
        shares[other].append(given)
        moved = costs[given] - sum(costs[item] for item in taken)
        loads[most] -= moved
        loads[other] += moved


def _best_swap(most: list[int], least: list[int], gap: int) -> tuple[int, int | None] | None:
    """Return which item of `most` to give for which of `least` (or for nothing): the swap whose difference is nearest
    to half the gap."""
    order = sorted(range(len(least)), key=least.__getitem__)
    values = [least[i] for i in order]
    best: tuple[int, int | None] | None = None
    nearest = gap  # of |gap - 2 * difference|: below it, the larger of the two loads falls
    for give, cost in enumerate(most):
        at = bisect_left(values, cost - gap // 2)
        for place in (at - 1, at):
            if 0 <= place < len(values) and abs(gap - 2 * (cost - values[place])) < nearest:
                nearest, best = abs(gap - 2 * (cost - values[place])), (give, order[place])
        if abs(gap - 2 * cost) < nearest:
            nearest, best = abs(gap - 2 * cost), (give, None)
    return best


# --- micro-batches ------------------------------------------------------------------------------------------


def micro_batches(pieces: Sequence[SampleCluster], limit: int, count: int = 0) -> list[list[SampleCluster]]:
    """Build balanced micro-batches of at most `limit` tokens, most expensive first: as few as possible, but at least
    `count`. A larger piece gets one of its own."""
    order = sorted(pieces, key=lambda piece: -piece.cost)
    least = max(count, -(-sum(min(piece.tokens, limit) for piece in pieces) // limit))
    while (found := _filled(order, limit, least)) is None:
        least += 1
    return sorted(found, key=lambda batch: -sum(piece.cost for piece in batch))


def _filled(order: list[SampleCluster], limit: int, count: int) -> list[list[SampleCluster]] | None:
    """Put each piece into the cheapest micro-batch with room. Returns None if a piece does not fit."""
    found: list[list[SampleCluster]] = [[] for _ in range(count)]
    heap = [(0, batch, limit) for batch in range(count)]  # cost, number, room
    for piece in order:
        full = []
        while heap and heap[0][2] < min(piece.tokens, limit):
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, batch, room = heapq.heappop(heap)
        found[batch].append(piece)
        for entry in (*full, (cost + piece.cost, batch, room - piece.tokens)):
            heapq.heappush(heap, entry)
    return found
