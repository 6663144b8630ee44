"""Experts of tokens are stored compactly, and those of the prompt once for all siblings."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from asyncrl.extensions.routing_replay.encoding import RoutingShape, compact, routing_shape, share_prompt, unpacked
from asyncrl.schema import Completion, Group, TokenRows, Trajectory, Turn, VersionSpan, encode
from tests.extensions.routing_replay.experts import SHAPE, kept, told


@pytest.mark.parametrize(("experts", "width"), [(8, 4), (256, 4), (257, 8), (1000, 8)])
@pytest.mark.parametrize("sparse", [(1, 3), (2, 3)])
def test_only_expert_layers_are_kept_in_small_integers(sparse, experts: int, width: int) -> None:
    shape = RoutingShape(4, sparse, 2, experts)
    rows = told(0, 5, shape)
    rows[0, 3, 0] = experts - 1
    data = compact(rows.tobytes(), shape)
    assert (shape.width, len(data)) == (width, 5 * width)
    np.testing.assert_array_equal(unpacked(data, shape), rows[:, list(sparse)])


def test_rows_of_another_model_are_refused() -> None:
    with pytest.raises(ValueError, match="of a model with only 8"):
        compact(np.full((1, 4, 2), -1, np.int32).tobytes(), SHAPE)
    with pytest.raises(ValueError, match="not rows of 4 x 2 int32"):
        compact(b"\0" * 33, SHAPE)
    with pytest.raises(ValueError, match="expert 8 of a model with only 8"):
        compact(np.full((1, 4, 2), [0, 8], np.int32).tobytes(), SHAPE)
    with pytest.raises(ValueError, match="not rows of 4 bytes"):
        unpacked(b"\0" * 5, SHAPE)
    assert compact(b"", SHAPE) == b""


def turn(observation: list[int], tokens: int, routing: TokenRows | None) -> Turn:
    spans = [VersionSpan(0, 0, tokens)] if tokens else []
    return Turn(observation, Completion([7] * tokens, [-1.0] * tokens, spans, "stop", routing))


def test_siblings_share_prompt_rows_and_turns_repeat_none() -> None:
    prompt = [1, 2, 3]
    first = [turn([], 2, kept(0, 4)), turn([5, 6], 3, kept(4, 9))]  # the last token of a turn is read in the next
    anew = [turn([], 2, kept(0, 4, sibling=1)), turn([5, 6], 3, kept(0, 9, sibling=1))]  # told from the start again
    group = share_prompt(Group("g", 0, prompt, [Trajectory(first, 0.0), Trajectory(anew, 1.0)], "t"))
    assert group.token_rows == kept(0, 3)
    for number, trajectory in enumerate(group.trajectories):
        assert [one.completion.token_rows for one in trajectory.turns] == [
            kept(3, 4, sibling=number),
            kept(4, 9, sibling=number),
        ]
    assert [t.reward for t in group.trajectories] == [0.0, 1.0]
    assert msgspec.msgpack.decode(encode(group), type=Group) == group
    rows = sum(len(one.completion.token_rows.rows) for t in group.trajectories for one in t.turns)
    assert rows + len(group.token_rows.rows) == (3 + 2 * 6) * SHAPE.width


def test_groups_without_experts_stay_and_siblings_borrow() -> None:
    plain = Group("g", 0, [1, 2], [Trajectory([turn([], 2, None)])], "t")
    assert share_prompt(plain) is plain
    members = [Trajectory([turn([], 2, None)]), Trajectory([turn([], 3, kept(0, 4))])]
    group = share_prompt(Group("g", 0, [1, 2], members, "t"))
    assert group.token_rows == kept(0, 2)
    assert [t.turns[0].completion.token_rows for t in group.trajectories] == [None, kept(2, 4)]


def test_shapes_are_those_of_the_models() -> None:
    common = {"num_hidden_layers": 4, "num_experts_per_tok": 2}
    qwen = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "moe_intermediate_size": 8, **common}
    assert routing_shape(qwen) == RoutingShape(4, (0, 1, 2, 3), 2, 6)
    assert routing_shape({**qwen, "mlp_only_layers": [2]}) == RoutingShape(4, (0, 1, 3), 2, 6)
    assert routing_shape({"architectures": ["LlamaForCausalLM"], **common}) is None
