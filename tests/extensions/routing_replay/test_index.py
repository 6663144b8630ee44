"""Keys name beginnings of sequences, packs carry them, and what one pass noted another finds."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl.algo.pack import pack
from asyncrl.algo.samples import Sample, build_samples
from asyncrl.extensions.routing_replay.encoding import RoutingShape, share_prompt
from asyncrl.extensions.routing_replay.index import RoutingReplayIndex, engine_routes, with_keys
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from tests.extensions.routing_replay.experts import SHAPE, kept, told

Groups = list[list[Sample]]


@st.composite
def batches(draw: st.DrawFn) -> Groups:
    """Groups whose prompts begin alike, or are the same."""
    rng = draw(st.randoms(use_true_random=False))
    head = [rng.randrange(9) for _ in range(draw(st.sampled_from([0, 2, 12])))]
    groups = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = head + [rng.randrange(3) for _ in range(rng.randint(1, 3))]
        answers = [[rng.randrange(9) for _ in range(rng.choice([0, 1, 2, 6]))] for _ in range(rng.randint(1, 3))]
        groups.append([Sample(prompt, ids, [True] * len(ids), 0, 0) for ids in answers])
    return groups


@given(batches())
@settings(max_examples=200)
def test_a_key_is_one_beginning_of_a_sequence(groups: Groups) -> None:
    keyed, count = with_keys(groups)
    owners: dict[int, object] = {}
    for group in keyed:
        for sample in group:
            sequence = sample.prompt_ids + sample.token_ids[:-1]
            assert len(sample.keys) == len(sequence)
            for position, key in enumerate(sample.keys.tolist()):
                begun = tuple(sequence[: position + 1])
                assert owners.setdefault(key, begun) == begun
    assert sorted(owners) == list(range(count))
    assert len(set(owners.values())) == count


@given(batches(), st.booleans(), st.sampled_from([1, 2, 7]))
@settings(max_examples=50, deadline=None)
def test_every_row_of_a_pack_carries_its_tokens_key(groups: Groups, share: bool, multiple: int) -> None:
    assume(any(sample.token_ids for group in groups for sample in group))  # without work a pack has no keys
    keyed, count = with_keys(groups)
    made = pack(keyed, share=share, multiple=multiple)
    tokens = torch.zeros(count, dtype=torch.int64)
    for sample in (s for group in keyed for s in group):
        tokens[sample.keys] = torch.tensor([*sample.prompt_ids, *sample.token_ids][: len(sample.keys)])
    padding = made.num_tokens - int((made.keys >= 0).sum())
    assert 0 <= padding < multiple
    real = made.num_tokens - padding
    assert made.keys[:real].min() >= 0
    assert tokens[made.keys[:real]].equal(made.token_ids[:real])
    assert pack(groups, share=share, multiple=multiple).keys is None


def test_keys_stay_on_the_host_and_without_replay_there_are_none() -> None:
    keyed, _ = with_keys([[Sample([1, 2], [3, 4], [True] * 2, 0, 0)]])
    assert pack(keyed).to(torch.device("meta")).keys.device.type == "cpu"


@pytest.mark.parametrize("experts", [8, 300])
def test_routes_give_back_what_was_put_and_say_what_was_not(experts: int) -> None:
    shape = RoutingShape(4, (1, 3), 2, experts)
    routes = RoutingReplayIndex.empty(6, 2, shape)
    one = torch.tensor([[[0, experts - 1], [1, 2]], [[3, 4], [5, 6]], [[7, 7], [7, 7]]])
    routes.put(torch.tensor([4, 1, -1]), one)
    found, known = routes.get(torch.tensor([1, 4, -1, 0]))
    assert known.tolist() == [True, True, False, False]
    assert found[:2].long().equal(one[[1, 0]])
    routes.put(torch.tensor([0]), one[:1, :1], slice(1, 2))
    assert routes.get(torch.tensor([0]), slice(1, 2))[0].long().tolist() == [[[0, experts - 1]]]


@pytest.mark.parametrize("experts", [8, 300])
def test_engines_rows_come_to_the_tokens_that_they_read(experts: int) -> None:
    """Two turns, a sibling whose last rows are missing, a second group with the same prompt; one of two layers."""
    shape = RoutingShape(SHAPE.layers, SHAPE.sparse, SHAPE.topk, experts)

    def turn(observation: list[int], tokens: int, start: int, end: int, sibling: int) -> Turn:
        spans = [VersionSpan(0, 0, tokens)]
        routing = kept(start, end, shape, sibling)
        return Turn(observation, Completion([7 + sibling] * tokens, [-1.0] * tokens, spans, "stop", routing))

    one = Trajectory([turn([], 2, 0, 4, 0), turn([5, 6], 3, 4, 9, 0)])
    cut = Trajectory([turn([], 4, 0, 5, 1)])
    groups = [Group("g", 0, [1, 2, 3], [one, cut], "t"), Group("h", 1, [1, 2, 3], [cut], "t")]
    groups = [share_prompt(group) for group in groups]
    samples, count = with_keys(build_samples(groups))
    assert count == 3 + (7 - 1) + (4 - 1)  # the prompt once, and different answers without their last token
    routes = engine_routes(groups, samples, count, shape, [1])  # the second layer with experts, layer 3
    for sample, sibling, end in ((samples[0][0], 0, 9), (samples[0][1], 1, 5), (samples[1][0], 1, 5)):
        found, known = routes.get(sample.keys)
        assert known.tolist() == [position < end for position in range(len(sample.keys))]
        expected = np.concatenate([told(0, 3, shape), told(3, end, shape, sibling)])[:, [3]]
        np.testing.assert_array_equal(found[:end].numpy(), expected)  # the prompt's are the first sibling's, for all


def test_keys_of_a_batch_of_long_prompts_are_made_quickly() -> None:
    draw = random.Random(0)
    head = [draw.randrange(50000) for _ in range(2000)]
    prompts = [[*head, *(draw.randrange(50000) for _ in range(500))] for _ in range(64)]
    groups = [[Sample(prompt, [n] * 1000, [True] * 1000, 0, 0) for n in range(8)] for prompt in prompts]
    keyed, count = with_keys(groups)
    assert count == 2000 + 64 * 500 + 64 * 8 * 999
    assert keyed[3][2].keys[:2000].equal(keyed[9][0].keys[:2000])
