"""Tests of one policy update with a table of bigrams as the network: the inputs of the loss."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.algo.balance import Costs
from asyncrl.algo.loss import LOSSES
from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import build_samples, shares
from asyncrl.algo.table import LossRows, TokenTable, build_table
from asyncrl.errors import ConfigError
from asyncrl.extension import Extension, TrainerHooks
from asyncrl.platforms import here
from asyncrl.schema import Batch, Completion, Group, Trajectory, Turn, VersionSpan
from tests.algo import tables
from tests.fakes import in_parts, tiny_config
from tests.integration.losses import fitting

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    here().prepare_trainer()
    from asyncrl.trainer import policy as module
    from asyncrl.trainer.encoder import Encoder
    from asyncrl.trainer.microbatches import Groups, packs_of_rank
    from asyncrl.trainer.policy import Policy
    from asyncrl.trainer.transformation import Transformation

pytestmark = pytest.mark.integration

VOCAB, LONGEST = 7, 4
Change = Callable[[TokenTable], TokenTable]


class Bigrams:
    """Network that predicts the next token from the last one, and counts its passes."""

    def __init__(self, trainer: Any = None, _: Path | None = None, parallel: Any = None, **__: Any) -> None:
        self.weights, self.hf, self.encoder = None, {"vocab_size": VOCAB}, Encoder()
        self.transformation = Transformation()
        self._place = trainer, parallel
        self._parallel = parallel
        self.logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)).requires_grad_()
        self.passes: list[str] = []
        self.gradients: list[Tensor] = []

    def packs(self, groups: Groups) -> list[Pack]:
        return packs_of_rank(groups, *self._place, Costs())

    def train(
        self, packs: list[Pack], visit: Callable[[Any, Pack], Tensor], *, first: bool = True, last: bool = True
    ) -> None:
        self.passes.append("train" if first and last else f"train, {first=}, {last=}")
        for pack in packs:
            visit(Rows(self.logits[pack.token_ids[pack.logit_rows]]), pack).backward()

    def scale_gradient(self, factor: float) -> None:
        assert self.logits.grad is not None
        self.logits.grad *= factor

    def gather(self) -> None:
        """Do nothing: all parameters are here."""

    @torch.no_grad()
    def score(self, packs: list[Pack], visit: Callable[[Any, Pack], Tensor]) -> None:
        self.passes.append("score")
        for pack in packs:
            visit(Rows(self.logits[pack.token_ids[pack.logit_rows]]), pack)

    def column(self, groups: Groups, num_tokens: int, visit: Callable[[Any, Pack], Tensor]) -> Tensor:
        from asyncrl.trainer.network import Network

        return Network.column(self, groups, num_tokens, visit)  # type: ignore[arg-type]


class Rows:
    """Replacement of trainer/head.py."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def score(self, pack: Pack, temperature: float, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        every = torch.log_softmax(self._logits / temperature, -1)[pack.row_of_target]
        of_targets = -(every.exp() * every).sum(-1) if entropy else None
        return every.gather(1, pack.targets[:, None])[:, 0], of_targets


class Descent:
    """Optimizer of plain gradient steps, which keeps the gradients."""

    lr = 0.5

    def __init__(self, trainer: Any, network: Bigrams, max_steps: int) -> None:
        self.network = network

    def zero_grad(self) -> None:
        self.network.logits.grad = None

    def step(self) -> tuple[float, bool]:
        gradient = self.network.logits.grad
        assert gradient is not None
        self.network.gradients.append(gradient.clone())
        with torch.no_grad():
            self.network.logits -= self.lr * gradient
        return float(gradient.norm()), True


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Network", Bigrams)
    monkeypatch.setattr(module, "NetworkOptimizer", Descent)
    monkeypatch.setattr(module, "encoder_of", lambda *_: Encoder())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)


MASKED: Any = {"shaping.mask_truncated": True}
UNCLIPPED = {"name": "ppo", "clip_low": 0.0, "clip_high": 0.0}


def policy(temperature: float = 1.0, more: dict[str, Any] | None = None, **algo: Any) -> Policy:
    trainer = {name: algo.pop(name) for name in ("micro_batch_tokens", "batch_parts") if name in algo}
    changes = {f"algo.{name}": value for name, value in ({"entropy_bonus": 0.0} | algo).items()}
    changes |= {f"trainer.{name}": value for name, value in trainer.items()}
    rollout = {"rollout.max_new_tokens": LONGEST, "rollout.temperature": temperature}
    config = tiny_config(**changes, **rollout, **(more or {}))
    place: Any = SimpleNamespace(
        cp=1, tp=1, tp_rank=0, dp=1, dp_rank=0, etp=1, ep=1, pp=1, counts=True, device=torch.device("cpu")
    )
    return Policy(config, Path(), place)


def answer(tokens: list[int], logprob: float, finish: str = "stop") -> Completion:
    size = len(tokens)
    return Completion(tokens, [logprob - i / 8 for i in range(size)], [VersionSpan(1, 0, size)], finish)


def batch() -> Batch:
    """Return two groups, in which one answer is truncated, one is empty, and one has two turns."""
    first = [
        Trajectory([Turn([], answer([1, 2], -1.0))], 1.0),
        Trajectory([Turn([], answer([3, 3, 4, 6], -2.5, "length"))], 0.0),
        Trajectory([Turn([], Completion([], [], [], "stop"))], 0.5),
    ]
    second = [
        Trajectory([Turn([], answer([5], -0.1)), Turn([2, 2], answer([6, 1], -3.0))], 2.0),
        Trajectory([Turn([], answer([0, 4, 4], -1.5))], 0.25),
    ]
    return Batch(3, [Group("a", 0, [1, 2], first, "made"), Group("b", 1, [3, 4, 5], second, "made")], {})


def logprobs_of(logits: Tensor) -> Tensor:
    """Return the log-probabilities, [N], by iterating over the batch."""
    found = []
    for group in batch().groups:
        for trajectory in group.trajectories:
            last = group.prompt_ids[-1]
            for turn in trajectory.turns:
                for token in turn.observation:
                    last = token
                for token in turn.completion.token_ids:
                    found.append(torch.log_softmax(logits[last], -1)[token])
                    last = token
    return torch.stack(found).double()


def by_formula(
    loss: str,
    advantage: str = "grpo",
    weight: str | None = "tis",
    change: Change = lambda table: table,
    kept: Tensor | None = None,
) -> Tensor:
    """Return the gradient of one step, computed explicitly over the whole table."""
    logits = Bigrams().logits
    table, samples = build_table(batch().groups, 3), [s for one in build_samples(batch().groups) for s in one]
    logprobs = logprobs_of(logits)
    table = change(table)
    keep = torch.ones(table.num_tokens, dtype=torch.bool) if kept is None else kept
    rows = table.trained(tables.advantage(advantage)(table), keep).with_proximal(logprobs.detach())
    traits = tables.loss(loss).traits
    if traits.selection:
        rows = replace(rows, keep=traits.selection(rows))
        assert not bool(rows.keep.all())
    factor = tables.correction(logprobs, rows, weight) * rows.keep
    losses = factor * tables.loss(loss)(logprobs, rows)
    aggregation = "sequence" if traits.per_sequence else "token"
    (shares(table, samples, aggregation, LONGEST) * losses).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize("loss", LOSSES)
def test_gradient_of_one_step_is_that_of_the_formula(loss: str) -> None:
    one = policy(**fitting(loss))
    figures = one.update(batch())
    expected = by_formula(loss, weight=fitting(loss)["correction"])
    torch.testing.assert_close(one.network.gradients, [expected], rtol=1e-5, atol=1e-6)
    assert one.network.passes == (["score"] if tables.loss(loss).traits.selection else []) + ["train"]
    assert figures["tokens/trained"] == 12.0
    assert (figures["correction/masked"] > 0) == (tables.loss(loss).traits.selection is not None)


def flat(slot: int) -> Group:
    """Return a group without signal."""
    return Group(f"f{slot}", slot, [1], [Trajectory([Turn([], answer([2], -1.0))], 0.5) for _ in range(2)], "made")


@pytest.mark.parametrize("order", ["fab", "afb", "abf", "ffa", "ff"])
def test_parts_without_gradient_count_and_do_not_run(order: str) -> None:
    a, b = batch().groups
    groups = [{"a": a, "b": b}.get(name) or flat(place) for place, name in enumerate(order)]
    whole, parted = policy(), policy(batch_parts=len(order))
    expected = whole.update(Batch(3, groups, {}))
    *none, figures = [parted.update(part) for part in in_parts(Batch(3, groups, {}), len(order))]
    assert none == [{}] * (len(order) - 1)
    for one in (expected, figures):
        del one["tokens/packed"], one["tokens/shared"]  # of the split alone
    assert figures == pytest.approx(expected, rel=1e-6, abs=1e-9)
    torch.testing.assert_close(parted.network.gradients, whole.network.gradients, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(parted.started, whole.started, equal_nan=True)
    ran = sum(name != "f" for name in order)
    assert len(parted.network.passes) == (ran + (order[-1] == "f" and ran > 0))
    again = parted.update(Batch(4, groups, {}))  # the next batch begins anew
    assert again["groups/trained"] == figures["groups/trained"]


@pytest.mark.parametrize("loss", LOSSES)
def test_micro_batches_change_no_step(loss: str) -> None:
    runs = [policy(**fitting(loss), mini_batches=1, epochs=3, micro_batch_tokens=size) for size in (1, 1000)]
    figures = [one.update(batch()) for one in runs]
    assert runs[0].network.passes == ["score", "train", "train", "train"]
    torch.testing.assert_close(runs[0].network.gradients, runs[1].network.gradients, rtol=1e-5, atol=1e-6)
    for one in figures:
        del one["tokens/packed"], one["tokens/shared"]  # of the split alone
    assert figures[0] == pytest.approx(figures[1], rel=1e-5, abs=1e-6)


def test_steps_share_the_policy_that_they_started_from() -> None:
    one = policy(mini_batches=2, loss=UNCLIPPED)
    one.update(batch())
    assert one.network.passes == ["score", "train", "train"]
    again = policy(mini_batches=1, epochs=2, loss=UNCLIPPED)
    figures = again.update(batch())
    # what the first step moved the way it wanted, the second finds clipped at width 0
    assert float(again.network.gradients[1].norm()) < 0.5 * float(again.network.gradients[0].norm())
    assert figures["loss/clipped"] > 0.5


@pytest.mark.parametrize("proximal", ["log_linear", "behaviour"])
def test_proximal_policy_without_a_pass_of_its_own_costs_none(proximal: str) -> None:
    one = policy(proximal=proximal, correction=None, epochs=2)
    one.update(batch())
    assert one.network.passes == ["train", "train"]


class Own(Extension):
    """Turns rewards around, and doubles advantages and losses."""

    signal = True

    def trainer(self, policy: Policy) -> TrainerHooks:
        return OwnHooks(policy)


class OwnHooks(TrainerHooks):
    signal = True

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.inside = False

    @contextmanager
    def passes(self, *, start: bool) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def columns(self, groups: Groups, table: TokenTable, version: int) -> TokenTable:
        assert bool(torch.isfinite(self._policy.score_at(1.0, groups, table)).all())
        return replace(table, reward=-table.reward)

    def credited(self, logprobs: Tensor, rows: LossRows) -> LossRows:
        return replace(rows, advantages=2 * rows.advantages)

    def loss(self, losses: Tensor, logprobs: Tensor, rows: LossRows) -> Tensor:
        return 2 * losses

    def distances(self, logprobs: Tensor, table: TokenTable, ran: Tensor) -> dict[str, float]:
        return {"own/compared": float(torch.isfinite(logprobs[ran]).sum())}


OWN = {"extensions": {"own": f"{__name__}:Own"}}


def test_extensions_know_every_pass_of_the_policy() -> None:
    one = policy(temperature=0.5, more=OWN, mini_batches=2)
    own: Any = one.hooks["own"]
    passes: list[tuple[str, bool]] = []
    for name in ("score", "train"):
        plain = getattr(one.network, name)

        def noted(*given: Any, name: str = name, plain: Callable[..., None] = plain, **how: Any) -> None:
            passes.append((name, own.inside))
            plain(*given, **how)

        setattr(one.network, name, noted)
    one.update(batch())
    assert passes == [("score", True), ("score", True), ("train", True), ("train", True)]


def test_columns_and_losses_of_an_extension_are_trained() -> None:
    plain, own = policy(), policy(more=OWN)
    plain.update(batch())
    assert own.update(batch())["own/compared"] == 12.0
    torch.testing.assert_close(own.network.gradients, [-4 * plain.network.gradients[0]], rtol=1e-5, atol=1e-6)


def test_groups_without_advantage_run_for_a_signal() -> None:
    one = policy(advantage="none", more=OWN)
    assert one.update(batch())["groups/trained"] == 2
    with pytest.raises(ConfigError, match="Nothing would be learned"):
        policy(advantage="none")


def test_shaped_rewards_make_the_advantages() -> None:
    shaping = {"overlong_buffer": 2, "overlong_penalty": 0.5, "length_penalty": 0.1, "clip": 1.5}
    one = policy(advantage="dr_grpo", **{f"shaping.{name}": value for name, value in shaping.items()})
    one.update(batch())
    lengths = torch.tensor([2, 4, 0, 3, 3])
    rewards = torch.tensor([1.0, -0.5, 0.5, 1.75, 0.0]) - 0.1 * lengths / 4
    expected = by_formula("ppo", "dr_grpo", change=lambda t: replace(t, reward=rewards.double().clamp(-1.5, 1.5)))
    torch.testing.assert_close(one.network.gradients, [expected], rtol=1e-5, atol=1e-6)


def test_truncated_answers_count_and_are_not_trained() -> None:
    one = policy(**MASKED)
    figures = one.update(batch())
    cut = torch.tensor([False] * 2 + [True] * 4 + [False] * 6)
    expected = by_formula("ppo", kept=~cut)
    torch.testing.assert_close(one.network.gradients, [expected], rtol=1e-5, atol=1e-6)
    assert figures["correction/masked"] == pytest.approx(4 / 12)


def test_truncated_answers_have_no_entropy_either() -> None:
    plain, bonus = (policy(entropy_bonus=value, **MASKED) for value in (0.0, 0.1))
    for one in (plain, bonus):
        one.update(batch())
    difference = bonus.network.gradients[0] - plain.network.gradients[0]
    logits = Bigrams().logits
    rows = [2, 1, 5, 2, 6, 5, 0, 4]  # what precedes the kept tokens
    entropy = torch.distributions.Categorical(logits=logits[torch.tensor(rows)]).entropy().sum()
    (-0.1 * entropy / 12).backward()
    assert logits.grad is not None
    torch.testing.assert_close(difference, logits.grad, rtol=1e-4, atol=1e-6)
    assert not bool(difference[3].any())  # only in the cut answer a token follows a 3


def test_group_whose_signal_is_left_out_is_not_run() -> None:
    cut = [Trajectory([Turn([], answer([1, 2], -1.0, "length"))], reward) for reward in (0.0, 1.0)]
    whole = [Trajectory([Turn([], answer([3], -1.0))], reward) for reward in (0.0, 1.0)]
    both = Batch(1, [Group("a", 0, [1, 2], cut, "made"), Group("b", 1, [3, 4], whole, "made")], {})
    figures = policy(**MASKED).update(both)
    assert (figures["groups/trained"], figures["tokens/trained"]) == (1.0, 2.0)
    alone = Batch(1, both.groups[:1], {})
    nothing = policy(**MASKED).update(alone)
    assert (nothing["groups/trained"], nothing["step/skipped"]) == (0.0, 1.0)


class Wrapped(TrainerHooks):
    """Sends the weights in a list."""

    def sent(self, weights: Any) -> Any:
        return [weights]


def test_what_extensions_make_of_the_weights_is_sent() -> None:
    weights, plain = object(), TrainerHooks()

    def sent(*hooks: TrainerHooks) -> Any:
        return Policy.sent(SimpleNamespace(weights=weights, hooks=dict(enumerate(hooks))))  # type: ignore[arg-type]

    assert sent(plain, plain) is weights
    assert sent(Wrapped(), plain, Wrapped()) == [[weights]]
