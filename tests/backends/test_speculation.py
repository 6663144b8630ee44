"""Tests of the stand-ins for SGLang's kernels of speculative decoding on a CPU."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from asyncrl.backends.cpu.paged_attention import attend, make_plan
from asyncrl.backends.cpu.speculation import NgramCorpus, verify_tree_greedy_cpu

SIZE = 8
"""Nodes of a tree of drafts."""


def corpus(*texts: list[int]) -> NgramCorpus:
    made = NgramCorpus(capacity=1000, max_bfs_breadth=3, draft_token_num=SIZE)
    made.insert(texts)
    return made


def paths(tokens: list[int], ways: Tensor) -> list[list[int]]:
    """Return the tokens on the way to each node."""
    return [[tokens[node] for node in way.nonzero().flatten().tolist()] for way in ways]


def links(ways: Tensor) -> tuple[list[int], list[int]]:
    """Return each node's first child and next sibling, -1 for none."""
    above = [way.nonzero().flatten().tolist()[:-1] for way in ways]
    child, sibling = [-1] * SIZE, [-1] * SIZE
    for node in reversed(range(1, SIZE)):
        sibling[node], child[above[node][-1]] = child[above[node][-1]], node
    return child, sibling


def test_drafts_are_what_followed_the_longest_known_end_of_a_context() -> None:
    known = corpus([1, 2, 3, 4], [9, 2, 5], [1, 2, 6])
    (tokens, ways) = (torch.from_numpy(found) for found in known.match_stateful([0], [[7, 1, 2]], [3]))
    drafted = paths(tokens.tolist(), ways.view(SIZE, SIZE).bool())
    assert drafted[:4] == [[2], [2, 6], [2, 3], [2, 3, 4]], "after 1 2 came 6, and before that 3; 5 came after 9 2"
    assert drafted[4:] == [[2, 0]] * (SIZE - 4)
    known.reset()
    assert known.match_stateful([0], [[7, 1, 2]], [3])[0].tolist() == [2] + [0] * (SIZE - 1)


def test_tokens_are_the_targets_whatever_is_drafted() -> None:
    """The tokens that verification adds are those of a walk in which each next token is the target's at that place."""
    shuffled = random.Random(0)
    lengths = set()
    for _ in range(300):
        texts = [[shuffled.randrange(3) for _ in range(12)] for _ in range(4)]
        tokens, ways = (torch.from_numpy(x) for x in corpus(*texts).match_stateful([0], [texts[0][:5]], [5]))
        ways = ways.view(SIZE, SIZE).bool()
        drafted, (child, sibling) = paths(tokens.tolist(), ways), links(ways)
        target = torch.randint(3, (1, SIZE))
        predicts, index = torch.zeros(SIZE, dtype=torch.int32), torch.full((1, SIZE), -1, dtype=torch.int32)
        count = torch.zeros(1, dtype=torch.int32)
        rows, nodes = torch.arange(SIZE)[None], tokens[None]
        verify_tree_greedy_cpu(
            predicts, index, count, nodes, rows, torch.tensor([child]), torch.tensor([sibling]), target
        )
        added = predicts[index[0, : int(count) + 1]].tolist()
        found, node = [], 0
        while node >= 0:
            found.append(int(target[0, node]))
            after = [n for n in range(1, SIZE) if drafted[n][:-1] == drafted[node] and ways[n, node]]
            node = next((n for n in after if drafted[n][-1] == found[-1]), -1)
        assert added == found
        lengths.add(len(added))
    assert len(lengths) > 2, "no test of accepted drafts"


def test_a_draft_attends_to_the_context_and_to_the_drafts_on_its_way_alone() -> None:
    torch.manual_seed(0)
    context, heads, width = 5, 2, 4
    ways = torch.eye(3, dtype=torch.bool)
    ways[:, 0] = True  # two drafts after the root, neither after the other
    k, v = torch.randn(2, 16, heads, width)
    query = torch.randn(3, heads, width)
    slots = torch.randperm(16)[None, : context + 3]
    found = attend(make_plan(slots, [context + 3], [3], ways[None]), query, torch.empty_like(query), k, v, 0.5)
    for node in range(3):
        seen = slots[0][torch.cat([torch.ones(context, dtype=torch.bool), ways[node]])]
        scores = torch.einsum("hd,khd->hk", query[node] * 0.5, k[seen]).softmax(-1)
        torch.testing.assert_close(found[node], torch.einsum("hk,khd->hd", scores, v[seen]))
