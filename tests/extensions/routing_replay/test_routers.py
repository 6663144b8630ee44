"""A router that is given its experts: Megatron's own function around it, for every kind of router of the families."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.platforms import here

here().prepare_trainer()

import torch  # noqa: E402
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function as route  # noqa: E402
from torch import Tensor  # noqa: E402

from asyncrl.extensions.routing_replay.routers import RouterReplay  # noqa: E402
from tests.trainer.host_waits import META, OnlyOnDevice, on_device  # noqa: E402

TOKENS, EXPERTS, K = 40, 8, 4
BIAS = torch.linspace(-0.3, 0.3, EXPERTS)
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax of the chosen": {},
    "chosen of the softmax": {"use_pre_softmax": True},
    "sigmoid with bias, groups and a factor": {
        "score_function": "sigmoid",
        "expert_bias": BIAS,
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": 1.5,
    },
}


def weights(logits: Tensor, chosen: Tensor, router: str) -> Tensor:
    """Return the router's weights of the given experts, [n, k], computed by hand."""
    if router == "softmax of the chosen":
        return logits.gather(1, chosen).softmax(1)
    if router == "chosen of the softmax":
        return logits.softmax(1).gather(1, chosen)
    scores = logits.sigmoid().gather(1, chosen)
    return 1.5 * scores / scores.sum(1, keepdim=True)


def run(logits: Tensor, router: str, choice: RouterReplay | None) -> tuple[Tensor, Tensor, Tensor]:
    """Shares and map [n, experts], and the gradient of a function of the shares."""
    logits = logits.clone().requires_grad_()
    shares, chosen = route(logits, K, **ROUTERS[router], router_replay=choice)
    (shares * torch.linspace(-1, 2, shares.numel()).view_as(shares)).sum().backward()
    return shares.detach(), chosen, logits.grad


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("router", ROUTERS)
def test_its_own_choice_given_back_changes_no_bit(logits: Tensor, router: str) -> None:
    choice = RouterReplay(logits.device)
    plain, recorded = run(logits, router, None), run(logits, router, choice)
    choice.given = (choice.own, torch.ones(TOKENS, dtype=torch.bool))
    replayed = run(logits, router, choice)
    for one, other, third in zip(plain, recorded, replayed, strict=True):
        assert one.equal(other)
        assert one.equal(third)
    assert choice.compared.tolist() == [0.0, TOKENS, TOKENS]


@pytest.mark.parametrize("router", ROUTERS)
def test_given_experts_use_the_routers_own_shares(logits: Tensor, router: str) -> None:
    """Whatever groups they are in; tokens whose experts are not known choose."""
    draw = torch.Generator().manual_seed(1)
    given = torch.stack([torch.randperm(EXPERTS, generator=draw)[:K] for _ in range(TOKENS)])
    known = torch.rand(TOKENS, generator=draw) < 0.8
    choice = RouterReplay(logits.device)
    own = run(logits, router, choice)
    choice.given = (given, known)
    shares, chosen, gradient = run(logits, router, choice)
    leaf = logits.clone().requires_grad_()
    expected = torch.zeros_like(logits).scatter(1, given, weights(leaf, given, router))
    (expected * torch.linspace(-1, 2, expected.numel()).view_as(expected)).sum().backward()
    torch.testing.assert_close(shares[known], expected[known])
    torch.testing.assert_close(gradient[known], leaf.grad[known])
    assert leaf.grad[known].abs().max() > 1e-3
    assert chosen[known].equal(torch.zeros_like(logits).scatter(1, given, 1.0)[known].bool())
    for mine, theirs in zip((shares, chosen, gradient), own, strict=True):
        assert mine[~known].equal(theirs[~known])
    same = (chosen & own[1])[known].sum(1)
    expected_counts = [(same < K).sum().item(), same.sum().item() / K, known.sum().item()]
    assert choice.compared.tolist() == pytest.approx(expected_counts)


def test_passes_without_gradient_are_not_compared(logits: Tensor) -> None:
    choice = RouterReplay(logits.device)
    choice.given = (torch.zeros(TOKENS, K, dtype=torch.int64) + torch.arange(K), torch.ones(TOKENS, dtype=torch.bool))
    with torch.no_grad():
        route(logits, K, router_replay=choice)
    assert choice.compared.tolist() == [0.0, 0.0, 0.0]


def test_the_comparison_of_replayed_experts_never_waits() -> None:
    choice = RouterReplay(META)
    choice.given = on_device(TOKENS, 2, dtype=torch.int64), on_device(TOKENS, dtype=torch.bool)
    with OnlyOnDevice():
        choice.get_replay_topk(on_device(TOKENS, 4), 2, None, None, lambda scores, k, **_: scores.topk(k))
