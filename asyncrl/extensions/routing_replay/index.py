"""Storage of the experts of every token of a batch, by key: one key for each distinct prefix of a sequence.

A token's hidden state, and so its experts, depend only on the tokens up to it. Sequences with a common prefix share its
keys, as they share its rows in a pack. What one pass recorded can therefore be looked up in another pass with different
micro-batches, packs and ranks.

    sequences    1 2 3 4 8    1 2 3 4 9 9    1 2 5 7       (the last token of a sequence is never an input)
    keys         0 1 2 3 4    0 1 2 3 5 6    0 1 7 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algo.pack import common_beginning
from asyncrl.algo.samples import Sample
from asyncrl.extensions.routing_replay.encoding import RoutingShape, unpacked
from asyncrl.schema import Group, TokenRows

Groups = list[list[Sample]]


@dataclass
class RoutingReplayIndex:
    """The experts of M tokens in L layers. If a token is not known, the router chooses itself."""

    experts: Tensor  # [M, L, k], uint8 or int16
    known: Tensor  # [M] bool

    @staticmethod
    def empty(count: int, layers: int, shape: RoutingShape) -> RoutingReplayIndex:
        """Create storage in which no token is known yet."""
        # With more than 256 experts: int16, which has the bytes of the engine's uint16 and more operations in torch.
        dtype = torch.uint8 if shape.itemsize == 1 else torch.int16
        return RoutingReplayIndex(
            torch.zeros(count, layers, shape.topk, dtype=dtype), torch.zeros(count, dtype=torch.bool)
        )

    def put(self, keys: Tensor, experts: Tensor, layers: slice = slice(None)) -> None:
        """Store experts [n, some layers, k] of tokens with these keys [n]. Tokens without a key (-1) are skipped."""
        has_key = keys >= 0
        keys = keys[has_key]
        self.experts[keys, layers] = experts[has_key].to(self.experts.dtype)
        self.known[keys] = True

    def get(self, keys: Tensor, layers: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return experts [n, some layers, k] and whether they are known [n]. The experts of unknown tokens are
        arbitrary."""
        at = keys.clamp(min=0)
        return self.experts[at, layers], self.known[at] & (keys >= 0)


def with_keys(groups: Sequence[Sequence[Sample]]) -> tuple[Groups, int]:
    """Return the samples with their keys, and the number of keys."""
    sequences = sorted(
        (sample.prompt_ids + sample.token_ids[:-1], number, place)
        for number, group in enumerate(groups)
        for place, sample in enumerate(group)
    )
    found: Groups = [list(group) for group in groups]
    before, keys, count = list[int](), torch.zeros(0, dtype=torch.int64), 0
    for sequence, number, place in sequences:  # in lexical order, each shares the most with the previous one
        shared = common_beginning(before, sequence)
        new = len(sequence) - shared
        keys = torch.cat([keys[:shared], torch.arange(count, count + new)])
        found[number][place] = replace(found[number][place], keys=keys)
        before, count = sequence, count + new
    return found, count


def engine_routes(
    groups: Sequence[Group], samples: Groups, count: int, shape: RoutingShape, layers: Sequence[int]
) -> RoutingReplayIndex:
    """Collect what the engines reported, for the layers with experts that are `layers` among shape.sparse. If several
    groups share a prompt, the first group's rows are used. Raises ValueError if rows are of another model."""
    routes = RoutingReplayIndex.empty(count, len(layers), shape)
    for group, siblings in zip(groups, samples, strict=True):
        follows = (sample for sample in siblings if sample.prompt_ids == group.prompt_ids)
        if group.token_rows and (first := next(follows, None)):
            _put(routes, first, group.token_rows, shape, layers)
        stretches = [turns for trajectory in group.trajectories for turns in trajectory.samples()]
        for turns, sample in zip(stretches, siblings, strict=True):
            for _, turn in turns:
                if turn.completion.token_rows:
                    _put(routes, sample, turn.completion.token_rows, shape, layers)
    return routes


def _put(
    routes: RoutingReplayIndex, sample: Sample, told: TokenRows, shape: RoutingShape, layers: Sequence[int]
) -> None:
    assert sample.keys is not None
    keys = sample.keys[told.start : told.end]
    fresh = ~routes.known[keys]
    rows = unpacked(told.rows, shape)[: len(keys), list(layers)].view("u1" if shape.itemsize == 1 else "<i2")
    routes.put(keys[fresh], torch.from_numpy(rows)[fresh])
