"""Samples over data-parallel ranks and micro-batches, by cost. Pure: every rank computes the same for all of them.

A piece is a group, or a part of one: siblings stay together, for what they share then runs once. A group is cut where
it holds more tokens than a micro-batch, or alone costs more than a rank's share. Costs are integers, so that no rank's
arithmetic can differ from another's.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from asyncrl.algo.samples import Sample
from asyncrl.algo.tree import common_beginning, stretches

TOKEN = 1 << 20
"""What a token costs in the products with all weights: the unit of cost."""
GAIN = 0.8
"""A group is cut for balance where its dearer half costs at most this share of it: halves repeat what it shares."""

EXCHANGES, PARTNERS = 3, 8  # for each rank, at most; among so many with the least


@dataclass(frozen=True)
class Costs:
    """Of one forward and backward pass, in units of TOKEN."""

    pair: int = 0  # a token that attends to one other
    row: int = 0  # a token that is predicted: the products with the vocabulary


@dataclass(frozen=True)
class Piece:
    """Siblings that run together."""

    samples: list[Sample]
    tokens: int  # in a pack of its own
    cost: int


Groups = list[list[Sample]]


def share_out(
    groups: Sequence[list[Sample]],
    ranks: int,
    limit: int,
    costs: Costs,
    *,
    share: bool = True,
    equal: bool = False,
    rounds: int = 1,
) -> list[list[Groups]]:
    """Micro-batches of each rank, the dearest first, each of at most `limit` tokens (a larger sample runs alone).

    Ranks get as many as they need, rounded up to a multiple of `rounds`, at least one; with `equal` all as many as the
    one with the most. Some may be empty.
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


def measure(samples: list[Sample], costs: Costs, share: bool = True) -> Piece:
    """One piece, its samples in an order in which those that share more stand together. What they share with other
    groups is not known here: an upper limit."""
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
        tree = stretches(lengths, common)
        tokens = sum(s.stop - s.start for s in tree)
        pairs = sum(_pairs(s.stop) - _pairs(s.start) for s in tree)
    return Piece(samples, tokens, tokens * TOKEN + pairs * costs.pair + rows * costs.row)


def _pairs(length: int) -> int:
    """Of a token and one at or before it."""
    return length * (length + 1) // 2


def _pieces(groups: Sequence[list[Sample]], ranks: int, limit: int, costs: Costs, share: bool) -> list[Piece]:
    """Groups, cut where they must be: first for the token limit, then for the balance."""
    pieces: list[Piece] = []
    for group in groups:
        if share:
            pieces += _within(group, limit, costs)
        else:
            pieces += [measure([sample], costs, share=False) for sample in group]
    fair = -(-sum(piece.cost for piece in pieces) // ranks)
    found: list[Piece] = []
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


def _within(samples: list[Sample], limit: int, costs: Costs) -> list[Piece]:
    """As few pieces of neighbours as the limit allows, in even parts."""
    whole = measure(samples, costs)
    if whole.tokens <= limit or len(samples) == 1:
        return [whole]
    parts = min(len(samples), -(-whole.tokens // limit))
    bounds = [len(samples) * part // parts for part in range(parts + 1)]
    return [piece for a, b in pairwise(bounds) for piece in _within(whole.samples[a:b], limit, costs)]


def _halves(piece: Piece, costs: Costs) -> list[Piece]:
    middle = len(piece.samples) // 2
    return [measure(part, costs) for part in (piece.samples[:middle], piece.samples[middle:])]


# --- ranks --------------------------------------------------------------------------------------------------


def partition(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Items for each rank: the dearest first, to the rank with the least (Graham's LPT), then exchanges between the
    rank with the most and one of those with the least, while they lower the maximum."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(heap)
        shares[rank].append(item)
        heapq.heappush(heap, (load + costs[item], rank))
    _exchange(shares, costs)
    return shares


def _exchange(shares: list[list[int]], costs: Sequence[int]) -> None:
    """In place. Each exchange leaves both ranks below what the one with the most had."""
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
    """Which of `most` to give for which of `least` (or for nothing): the difference nearest to half the gap."""
    order = sorted(range(len(least)), key=least.__getitem__)
    values = [least[i] for i in order]
    best: tuple[int, int | None] | None = None
    nearest = gap  # of |gap - 2 * difference|: below it the larger of the two loads falls
    for give, cost in enumerate(most):
        at = bisect_left(values, cost - gap // 2)
        for place in (at - 1, at):
            if 0 <= place < len(values) and abs(gap - 2 * (cost - values[place])) < nearest:
                nearest, best = abs(gap - 2 * (cost - values[place])), (give, order[place])
        if abs(gap - 2 * cost) < nearest:
            nearest, best = abs(gap - 2 * cost), (give, None)
    return best


# --- micro-batches ------------------------------------------------------------------------------------------


def micro_batches(pieces: Sequence[Piece], limit: int, count: int = 0) -> list[list[Piece]]:
    """Even ones of at most `limit` tokens, the dearest first: as few as go, but at least `count`. A larger piece has
    one of its own."""
    order = sorted(pieces, key=lambda piece: -piece.cost)
    least = max(count, -(-sum(min(piece.tokens, limit) for piece in pieces) // limit))
    while (found := _filled(order, limit, least)) is None:
        least += 1
    return sorted(found, key=lambda batch: -sum(piece.cost for piece in batch))


def _filled(order: list[Piece], limit: int, count: int) -> list[list[Piece]] | None:
    """Each piece in the cheapest micro-batch that has room; None if one has none."""
    found: list[list[Piece]] = [[] for _ in range(count)]
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
