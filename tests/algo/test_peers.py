"""Agreement with verl's and TRL's own functions, and the places where this project differs on purpose.

They are not among the packages of the tests: `make peers` installs them and runs this file.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algo.kl import ESTIMATORS
from asyncrl.algo.samples import Sample, shares
from asyncrl.algo.shaping import overlong
from asyncrl.algo.table import LossRows
from tests.algo.tables import advantage, correction, few, logs, loss, make, numbers, tables

LONGEST = 9


class Peer:
    """The names of several modules, in one place."""

    def __init__(self, *names: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._modules = [import_module(name) for name in names]
            except ImportError as error:
                pytest.skip(f"{error}: `make peers` installs what this file needs")

    def __getattr__(self, name: str) -> Any:
        for module in self._modules:
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(name)


@pytest.fixture(scope="module")
def verl() -> Peer:
    ppo = "verl.trainer.ppo"
    return Peer("verl.trainer.config", "verl.workers.config", f"{ppo}.rollout_corr_helper", f"{ppo}.core_algos")


@pytest.fixture(scope="module")
def trl() -> Peer:
    return Peer("trl.rewards.other_rewards", "trl.trainer.grpo_trainer")


# -- as peers hold a batch: one row for a sample, padded, with an observation of two tokens after its first token -----


def place(table: LossRows) -> tuple[Tensor, Tensor]:
    """Row and column of each token."""
    starts = table.lengths().cumsum(0) - table.lengths()
    within = torch.arange(table.num_tokens) - starts[table.sample]
    return table.sample, within + 2 * (within > 0)


def grid(values: Tensor, table: LossRows) -> Tensor:
    width = int(table.lengths().max()) + 3
    return values.new_zeros(table.num_samples, width).index_put(place(table), values)


def mask(table: LossRows) -> Tensor:
    return grid(torch.ones(table.num_tokens, dtype=torch.float64), table)


def weighed(table: LossRows, aggregation: str, losses: Tensor) -> Tensor:
    """This project's loss of a step over the whole table."""
    samples = [Sample([0], [], [], number, 0) for number in range(table.num_samples)]
    return (shares(table, samples, aggregation, LONGEST) * losses).sum()


def agree(ours: Any, theirs: Any, start: Tensor, rtol: float = 1e-6) -> None:
    """Values and gradients of two functions of log pi [N]; peers add 1e-8 to lengths and round numbers to float32."""
    found = []
    for one in (ours, theirs):
        leaf = start.clone().requires_grad_()
        value = one(leaf)
        found.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    torch.testing.assert_close(found[0], found[1], rtol=rtol, atol=0.1 * rtol)


filled = tables(min_length=1).map(lambda table: replace(table, advantages=table.per_token(table.reward)))
siblings = filled.filter(lambda table: int(torch.bincount(table.group).min()) > 1)
steps = st.floats(-0.5, 0.5)


# -- verl: advantages -------------------------------------------------------------------------------------------------


def of_verl(verl: Peer, name: str, table: LossRows, config: Any = None, **more: Any) -> Tensor:
    found, _ = verl.get_adv_estimator_fn(name)(
        token_level_rewards=grid(table.turns.token_rewards(), table),
        response_mask=mask(table),
        **({"index": table.group.numpy(), "config": config} if name != "gae" else {}),
        **more,
    )
    return found[place(table)]


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        ("grpo", "grpo", {}),
        ("grpo", "grpo_vectorized", {}),
        ("dr_grpo", "grpo", {"norm_adv_by_std_in_grpo": False}),
        ("rloo", "rloo", {}),
        ("rloo", "rloo_vectorized", {}),
        ("opo", "opo", {}),
        ("grpo_passk", "grpo_passk", {}),
        ("reinforce_pp", "reinforce_plus_plus", {}),
        ("reinforce_pp_baseline", "reinforce_plus_plus_baseline", {}),
    ],
)
@few
@given(table=siblings)
def test_advantages_are_verls(verl, ours: str, theirs: str, more: dict[str, Any], table: LossRows) -> None:
    found = advantage(ours, discount=0.9)(table)
    assume(not theirs.startswith("reinforce") or bool((found != 0).any()))  # see below
    other = of_verl(verl, theirs, table, verl.AlgoConfig(gamma=0.9), **more)
    torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)


@few
@given(table=filled)
def test_generalised_advantages_are_verls_across_observations(verl, table: LossRows) -> None:
    assume(table.num_tokens > 1)
    other = of_verl(verl, "gae", table, values=grid(table.column("values"), table), gamma=0.9, lam=0.8)
    found = advantage("gae", discount=0.9, gae_lambda=0.8)(table)
    torch.testing.assert_close(found, other, rtol=1e-6, atol=1e-6)


def test_verl_single_samples_get_no_advantage_here(verl) -> None:
    table = make([2, 1, 1], [5.0, 1.0, 0.0], [0, 1, 1])
    theirs = {name: of_verl(verl, name, table).tolist()[0] for name in ("grpo", "rloo", "opo", "rloo_vectorized")}
    assert theirs == {"grpo": pytest.approx(5.0, abs=1e-4), "rloo": 5.0, "opo": 5.0, "rloo_vectorized": 0.0}
    for name in ("grpo", "rloo", "opo"):
        assert advantage(name)(table).tolist()[:2] == [0.0, 0.0]


def test_verl_equal_returns_get_no_advantage_here(verl) -> None:
    table = make([1, 1], [5.0, 5.0])
    assert advantage("reinforce_pp")(table).tolist() == [0.0, 0.0]
    leak = of_verl(verl, "reinforce_plus_plus", table, verl.AlgoConfig(gamma=1.0))
    assert float(leak.abs().max()) > 1e-5  # its mean divides by the count plus 1e-8, its deviation is 1e-4


# -- verl: losses -----------------------------------------------------------------------------------------------------


def verl_loss(verl: Peer, name: str, rows: LossRows, mode: str, **settings: Any) -> Any:
    """The loss that it registers under this name, from the engine's policy as the old one."""
    plain = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    config = verl.ActorConfig(**plain | {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3} | settings)
    old, advantages = grid(rows.behaviour, rows), grid(rows.advantages, rows)

    def loss(logprobs: Tensor) -> Tensor:
        return verl.get_policy_loss_fn(name)(old, grid(logprobs, rows), advantages, mask(rows), mode, config)[0]

    return loss


MODES = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}


@pytest.mark.parametrize(
    ("ours", "theirs", "aggregation", "settings"),
    [
        ("ppo", "vanilla", "token", {}),
        ("ppo", "vanilla", "sequence", {}),
        ("ppo", "vanilla", "constant", {"global_batch_info": {"loss_scale_factor": LONGEST}}),
        ("gspo", "gspo", "sequence", {}),
        ("gspo_token", "gspo", "sequence", {}),
        ("cispo", "cispo", "token", {"clip_ratio_low": 1.0}),  # verl bounds the weight below as well
        ("sapo", "sapo", "sequence", {"tau_neg": 1.2}),
        ("dppo_tv", "dppo_tv", "token", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 20.0}),
    ],
)
@few
@given(table=filled, size=steps)
def test_losses_and_gradients_are_verls(
    verl, ours: str, theirs: str, aggregation: str, settings: dict[str, Any], table: LossRows, size: float
) -> None:
    table = replace(table, proximal=table.behaviour)
    start = table.behaviour + size * table.column("values")
    settings_of_ours = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "trust": 0.1, "down": 1.2}
    our_loss = loss(ours, **settings_of_ours)
    agree(
        lambda logprobs: weighed(table, aggregation, our_loss(logprobs, table)),
        verl_loss(verl, theirs, table, MODES[aggregation], **settings),
        start,
    )


def test_difference_verls_constant_is_the_padded_width(verl) -> None:
    loss = torch.ones(2, 3)
    padded = torch.nn.functional.pad(loss, (0, 2))
    found = [float(verl.agg_loss(x, x, "seq-mean-token-sum-norm")) for x in (loss, padded)]
    assert found == pytest.approx([1.0, 3 / 5])


def test_difference_verl_bounds_the_weight_of_cispo_below(verl) -> None:
    rows = replace(make([1], [0.0], advantages=[1.0]), behaviour=logs(0.2), proximal=logs(0.2))
    leaf = logs(0.02).requires_grad_()
    (theirs,) = torch.autograd.grad(verl_loss(verl, "cispo", rows, "token-mean")(leaf), leaf)
    (ours,) = torch.autograd.grad(loss("cispo")(leaf, rows).sum(), leaf)
    assert (theirs.item(), ours.item()) == (pytest.approx(-0.8), pytest.approx(-0.1))


# -- verl: corrections ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "level", "threshold"),
    [
        ({"name": "tis", "cap": 1.1}, "token", 1.1),
        ({"name": "tis_sequence", "cap": 1.3}, "sequence", 1.3),
        ({"name": "icepop", "cap": 1.2, "floor": 0.8}, "token", "0.8_1.2"),
    ],
)
@few
@given(table=filled)
def test_weights_are_verls(verl, settings: dict[str, Any], level: str, threshold: Any, table: LossRows) -> None:
    gap = table.proximal - table.behaviour
    theirs, _ = verl.compute_rollout_correction_weights(grid(gap, table), mask(table), level, threshold)
    ours = correction(gap, table, **settings)
    torch.testing.assert_close(ours, theirs[place(table)], rtol=1e-12, atol=1e-12)


def rejected(verl: Peer, gap: Tensor, table: LossRows, kind: str, low: float, high: float) -> list[float]:
    kept, _ = verl.compute_rollout_rejection_mask(grid(gap, table), mask(table), kind, f"{low}_{high}")
    return kept[place(table)].tolist()


@pytest.mark.parametrize(("ours", "theirs"), [("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")])
@few
@given(table=filled)
def test_masks_are_verls_with_bounds_of_the_inverse(verl, ours: str, theirs: str, table: LossRows) -> None:
    gap = table.proximal - table.behaviour
    found = correction(gap, table, **{ours: (1 / 1.3, 1 / 0.7)})
    assert found.tolist() == rejected(verl, gap, table, theirs, 0.7, 1.3)


def test_difference_verls_bounds_are_those_of_the_inverse_weight(verl) -> None:
    rho = [0.3, 0.6, 1.0, 1.9, 4.0]
    table = replace(make([1] * 5, [0.0] * 5), behaviour=numbers([0.0] * 5), proximal=logs(*rho))
    assert rejected(verl, logs(*rho), table, "seq_sum_k1", 0.5, 5.0) == [1.0, 1.0, 1.0, 1.0, 0.0]
    ours = correction(logs(*rho), table, sequence=(0.5, 5.0))
    assert ours.tolist() == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_verl_rejected_tokens_stay_in_the_denominator_here(verl) -> None:
    table = replace(make([1, 1], [0.0, 0.0], advantages=[1.0, 1.0]), proximal=numbers([-1.0, 1.0]))
    gap = table.proximal - table.behaviour
    kept, _ = verl.compute_rollout_rejection_mask(grid(gap, table), mask(table), "seq_sum_k1", "0.5_2.0")
    loss = grid(numbers([1.0, 1.0]), table)
    assert float(verl.agg_loss(loss, kept, "token-mean")) == 1.0  # decoupled mode overwrites the mask
    ours = correction(gap, table, sequence=(0.5, 2.0))
    assert float(weighed(table, "token", ours)) == 0.5


# -- verl: KL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@few
@given(table=filled)
def test_estimators_and_their_gradients_are_verls(verl, name: str, table: LossRows) -> None:
    agree(
        lambda logprobs: ESTIMATORS[name](logprobs, table.behaviour, table.behaviour).sum(),
        lambda logprobs: verl.kl_penalty(logprobs, table.behaviour, name).sum(),
        table.proximal,
        rtol=1e-12,
    )


@few
@given(table=filled)
def test_verls_straight_through_estimator_has_the_gradient_of_k2(verl, table: LossRows) -> None:
    leaf = table.proximal.clone().requires_grad_()
    (theirs,) = torch.autograd.grad(verl.kl_penalty(leaf, table.behaviour, "k3+").sum(), leaf)
    (ours,) = torch.autograd.grad(ESTIMATORS["k2"](leaf, table.behaviour, leaf).sum(), leaf)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


# -- TRL --------------------------------------------------------------------------------------------------------------


def trl_loss(trl: Peer, kind: str, rows: LossRows, level: str = "token", **args: Any) -> Any:
    """The loss of a GRPOTrainer that takes log-probabilities where it would run a model."""
    trainer = trl.GRPOTrainer
    plain: dict[str, Any] = {"delta": None, "steps_per_generation": 1, "use_bias_correction_kl": False}
    plain |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.2}
    plain |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    self = SimpleNamespace(
        model=SimpleNamespace(training=True),
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        off_policy_mask_threshold=args.pop("off_policy_mask_threshold", None),
        importance_sampling_level=level,
        beta=0.0,
        loss_type=kind,
        epsilon_low=0.2,
        epsilon_high=args.pop("epsilon_high", 0.3),
        args=SimpleNamespace(**plain | args),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_gamma_weights=trainer.get_gamma_weights,
        get_off_policy_mask=trainer.get_off_policy_mask,
    )
    ids = torch.zeros_like(mask(rows), dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": mask(rows),
        "advantages": grid(rows.advantages, rows),
        "old_per_token_logps": grid(rows.proximal, rows),
        "num_items_in_batch": mask(rows).sum(),
    }
    if level == "sequence" or kind == "vespo":
        inputs["advantages"] = rows.reward

    def loss(logprobs: Tensor) -> Tensor:
        padded = grid(logprobs, rows)
        self._get_per_token_logps_and_entropies = lambda *_, **__: (padded, torch.zeros_like(padded), None)
        return trainer._compute_loss(self, self.model, inputs)

    return loss


@pytest.mark.parametrize(
    ("ours", "theirs", "aggregation", "settings"),
    [
        ("ppo", "grpo", "sequence", {"delta": 3.0}),
        ("ppo", "dapo", "token", {"delta": 3.0}),
        ("ppo", "dr_grpo", "constant", {"delta": 3.0}),
        ("gspo", "grpo", "sequence", {"delta": 3.0, "level": "sequence"}),
        ("cispo", "cispo", "token", {"epsilon_high": 1.3}),  # TRL's is the bound itself
        ("sapo", "sapo", "sequence", {}),
        ("vespo", "vespo", "token", {}),
    ],
)
@few
@given(table=filled, size=steps)
def test_losses_and_gradients_are_trls(
    trl, ours: str, theirs: str, aggregation: str, settings: dict[str, Any], table: LossRows, size: float
) -> None:
    table = replace(table, proximal=table.behaviour)
    our_loss = loss(ours, clip_low=0.2, clip_high=0.3, dual_clip=3.0, down=1.2)
    agree(
        lambda logprobs: weighed(table, aggregation, our_loss(logprobs, table)),
        trl_loss(trl, theirs, table, **settings),
        table.behaviour + size * table.column("values"),
    )


@few
@given(table=filled, threshold=st.sampled_from([0.0, 0.1, 0.3]))
def test_mask_of_unlikely_bad_answers_is_trls(trl, table: LossRows, threshold: float) -> None:
    logprobs = table.proximal
    kept = trl.GRPOTrainer.get_off_policy_mask(
        table.reward[:, None], grid(logprobs, table), grid(table.behaviour, table), mask(table), threshold
    )
    found = correction(logprobs, table, opsm=threshold)
    assert found.tolist() == kept[table.sample, 0].tolist()


@given(st.integers(0, 20), st.integers(1, 8), st.integers(8, 16))
def test_punishment_of_overlong_answers_is_trls(trl, length: int, buffer: int, longest: int) -> None:
    (theirs,) = trl.get_soft_overlong_punishment(longest, buffer)(completion_ids=[[0] * length])
    assert overlong(numbers([length]), buffer, longest).item() == pytest.approx(theirs, abs=1e-12)
