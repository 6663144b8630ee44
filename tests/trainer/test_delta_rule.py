"""The prototype of the gated delta rule: over a pack it gives what transformers' rule gives over each sequence."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from asyncrl.algo.pack import Pack, pack
from tests.algo.packs import packs, sample
from tests.trainer.delta_rule import apart, convolved, delta_rule, rows_before, waves_of

HEADS, KEY, VALUE = 2, 6, 5


def exact() -> Any:
    """Return transformers' chunked rule without its casts to float32."""
    source = inspect.getsource(qwen.torch_chunk_gated_delta_rule)
    found: dict[str, Any] = {"torch": torch, "F": F, "l2norm": qwen.l2norm}
    exec(source.replace("torch.float32", "torch.float64").replace(".float()", ".double()"), found)
    return found["torch_chunk_gated_delta_rule"]


ORACLE = exact()


def drawn(p: Pack, seed: int) -> list[Tensor]:
    """Queries and keys of length 1, values, decays and betas, and a gradient, all in float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(p.num_tokens, HEADS, *shape, generator=generator, dtype=torch.float64)

    q, k = F.normalize(normal(KEY), dim=-1), F.normalize(normal(KEY), dim=-1)
    return [q, k, normal(VALUE), -F.softplus(normal()), normal().sigmoid(), normal(VALUE)]


def sequences(p: Pack) -> list[Tensor]:
    """Return the rows of each sequence."""
    index, _, flat = apart(p)
    return [index[branch.begin : branch.end] for branch in flat.branches]


def by_sequence(p: Pack, inputs: list[Tensor], of: Any) -> Tensor:
    """Compute each sequence by itself, and take each row of the pack from one that has it."""
    outs = [of(*(x[rows][None] for x in inputs))[0] for rows in sequences(p)]
    return torch.cat(outs)[apart(p)[1]]


def check(of: Any, expected: Any, inputs: list[Tensor], grad: Tensor, tolerance: float, relative: float = 0.0) -> None:
    """Compare outputs and all gradients."""
    mine, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    out, wanted = of(*mine), expected(*theirs)
    torch.testing.assert_close(out, wanted, rtol=relative, atol=tolerance)
    out.backward(grad)
    wanted.backward(grad)
    for x, y in zip(mine, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=relative, atol=tolerance)


@given(case=packs(), seed=st.integers(0, 99), size=st.sampled_from([1, 3, 16, 64]))
@settings(max_examples=40, deadline=None)
def test_outputs_and_gradients_are_those_of_each_sequence_alone(case: tuple, seed: int, size: int) -> None:
    """States are reset where a sequence begins, and handed on where sequences part."""
    groups, share, multiple = case
    p = pack(groups, share=share, multiple=multiple)
    *inputs, grad = drawn(p, seed)
    waves = waves_of(p, size)
    check(
        lambda *x: delta_rule(*x, waves),
        lambda *x: by_sequence(p, [*x], lambda *y: ORACLE(*y, chunk_size=8)[0]),
        inputs,
        grad,
        1e-10,
    )


@given(case=packs(), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_rule_without_trees_gives_the_same_on_copied_rows(case: tuple, seed: int) -> None:
    p = pack(case[0])
    *inputs, grad = drawn(p, seed)
    index, place, flat = apart(p)
    assert len(index) <= p.tokens_apart  # a sequence that is the beginning of another has no copy of its own
    check(
        lambda *x: delta_rule(*x, waves_of(p)),
        lambda *x: delta_rule(*(one[index] for one in x), waves_of(flat))[place],
        inputs,
        grad,
        1e-10,
    )


@given(case=packs(), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_convolutions_see_the_rows_before_in_their_own_sequence(case: tuple, seed: int) -> None:
    p = pack(case[0], share=case[1], multiple=case[2])
    generator = torch.Generator().manual_seed(seed)
    x, weight, grad = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((p.num_tokens, 3), (3, 4), (p.num_tokens, 3))
    )

    def alone(x: Tensor, weight: Tensor) -> Tensor:
        return by_sequence(p, [x], lambda y: F.conv1d(F.pad(y.mT, (3, 0)), weight[:, None], groups=3).mT)

    check(lambda x, weight: convolved(x, weight, rows_before(p)), alone, [x, weight], grad, 1e-12)


@pytest.mark.parametrize("share", [True, False])
def test_a_layer_of_qwen3_next_is_that_of_transformers(share: bool) -> None:
    """Projections in the order of transformers, convolution, rule, and gated norm, in float32."""
    torch.manual_seed(0)
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    config = qwen.Qwen3NextConfig(hidden_size=16, linear_value_head_dim=6, num_experts=2, **sizes)
    layer = qwen.Qwen3NextGatedDeltaNet(config, 0)
    p = pack(packs_of_two(), share=share)
    hidden, grad = torch.randn(2, p.num_tokens, 16)
    waves, before = waves_of(p), rows_before(p)

    def over_pack(x: Tensor) -> Tensor:
        q, k, v, z, b, a = (
            one[0] for one in layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x[None]), layer.in_proj_ba(x[None]))
        )
        mixed = torch.cat([one.flatten(1) for one in (q, k, v)], -1)
        mixed = F.silu(convolved(mixed, layer.conv1d.weight[:, 0], before))
        widths = [layer.key_dim, layer.key_dim, layer.value_dim]
        q, k, v = (
            one.unflatten(-1, (-1, width)) for one, width in zip(mixed.split(widths, -1), (8, 8, 6), strict=True)
        )
        q, k = (qwen.l2norm(one, -1).repeat_interleave(2, 1) for one in (q, k))
        g = -layer.A_log.exp() * F.softplus(a + layer.dt_bias)
        out = delta_rule(q, k, v, g, b.sigmoid(), waves)
        return layer.out_proj(layer.norm(out.flatten(0, 1), z.flatten(0, 1)).view(len(x), -1))

    check(over_pack, lambda x: by_sequence(p, [x], layer), [hidden], grad, 1e-4, 1e-5)
    weights = [*layer.parameters()]
    outs = (over_pack(hidden), by_sequence(p, [hidden], layer))
    for x, y in zip(*(torch.autograd.grad(out, weights, grad) for out in outs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def packs_of_two() -> Any:
    """Two groups with a common beginning of 70 tokens, one longer than a chunk."""
    common = [*range(70)]
    return [
        [sample([*common, group], [*range(10 * group, 10 * group + count)]) for count in (5, 90)] for group in (1, 2)
    ]
