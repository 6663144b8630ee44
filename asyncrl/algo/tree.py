"""Prefix tree of sequences, as segments that each appear once. Only lengths are used.

The input is the sequences in sorted order (so that those with longer common prefixes are neighbors) and how many tokens
neighbors share:

    A B C x y     A B C x z z     A B q         lengths 5 6 3      common 4 2
    segments, a parent before its children: A B | C x | y | z z | q
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

WORTH = 16
"""Maximum number of rows attending to a separate segment for each token that the separation saves. Such a row costs
some passes over its heads per layer; a token costs the products with all weights of the layer, 20 times as much in the
smallest real model."""


class TreeSegment(NamedTuple):
    """Tokens start..stop-1 of the sequences first..last-1."""

    first: int
    last: int
    start: int
    stop: int
    parent: int  # index of the segment before it, or -1


def tree_segments(lengths: Sequence[int], common: Sequence[int]) -> list[TreeSegment]:
    """Return the segments in depth-first order. `common[i]` is the number of leading tokens that sequences i and i + 1
    share.

    A common segment appears once if that saves enough, and otherwise once before each of the parts that follow it.
    """
    found: list[TreeSegment] = []
    todo = [(0, len(lengths), 0, -1)]
    while todo:
        first, last, start, parent = todo.pop()
        if last - first == 1:
            if lengths[first] > start:
                found.append(TreeSegment(first, last, start, lengths[first], parent))
            continue
        stop = min(common[first : last - 1])
        parts = [first, *(i + 1 for i in range(first, last - 1) if common[i] == stop), last]
        saved = (len(parts) - 2) * (stop - start)
        below = sum(lengths[first:last]) - (last - first) * stop
        if saved > 0 and WORTH * saved >= below:
            found.append(TreeSegment(first, last, start, stop, parent))
            start, parent = stop, len(found) - 1
        todo += [(*part, start, parent) for part in reversed(list(pairwise(parts)))]
    return found


def exits(parents: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return, for segments laid out one after the other, where the last descendant of each ends. `ends` holds their own
    ends."""
    found = list(ends)
    for child in range(len(parents) - 1, -1, -1):
        if parents[child] >= 0:
            found[parents[child]] = max(found[parents[child]], found[child])
    return found


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many leading tokens two lists share. Uses bisection, so that lists are compared in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
