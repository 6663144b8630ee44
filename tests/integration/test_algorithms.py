"""Tests of real Megatron on CPU without engines: several steps per batch, the reference model, replay and resets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.models.tiny import write_random_model
from tests.fakes import reusing
from tests.integration.updates import VOCAB, Outcome, drawn_groups, launch

pytestmark = pytest.mark.integration
SIZES = {"vocab": VOCAB, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "layers": 4, "dtype": "float32"}
SEVERAL = {"mini_batches": 2, "epochs": 2, "entropy_bonus": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a policy with a batch, and another model of its architecture."""
    made = tmp_path_factory.mktemp("algorithms")
    for name, seed in (("policy", 1), ("other", 2)):
        write_random_model(made / name / "model", arch="llama", tied=True, seed=seed, **SIZES)
    (made / "policy" / "groups.msgpack").write_bytes(msgspec.msgpack.encode(drawn_groups(seed=3)))
    return made


def trained(
    folder: Path, name: str, algo: dict[str, Any], others: dict[str, Any] | None = None, **settings: Any
) -> Outcome:
    return launch(folder, name, ["policy"], settings, algo, others)["policy"]


def same(one: Outcome, other: Outcome, *, atol: float) -> None:
    for mine, theirs in zip(one[0], other[0], strict=True):
        for figure in ("loss", "grad_norm", "logprob_gap/mean", "steps/optimizer"):
            assert mine[figure] == pytest.approx(theirs[figure], rel=1e-4, abs=2e-6), figure
    for name, tensor in one[1].items():
        torch.testing.assert_close(tensor, other[1][name], rtol=0, atol=atol)


def test_scoring_the_start_of_a_single_step_changes_nothing(folder: Path) -> None:
    """Scoring is skipped if a batch makes one step. A negligible KL penalty in the reward requires it here."""
    scored = {"kl.coefficient": 1e-30, "kl.place": "reward", "entropy_bonus": 0.0}
    same(trained(folder, "scored", scored), trained(folder, "skipped", {"entropy_bonus": 0.0}), atol=1e-6)


def test_several_steps_of_a_batch_do_not_depend_on_the_layout(folder: Path) -> None:
    alone = trained(folder, "several", SEVERAL)
    assert [step["steps/optimizer"] for step in alone[0]] == [4.0, 4.0]
    assert alone[0][0]["loss/clipped"] > 0  # later steps do move away from the start
    for name, layout in {
        "several-dp2": {"data_parallel": 2},
        "several-tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2, "micro_batch_tokens": 60},
    }.items():
        same(trained(folder, name, SEVERAL, **layout), alone, atol=2e-5)


def test_trust_region_leaves_out_the_steps_that_would_go_too_far(folder: Path) -> None:
    steps, _ = trained(folder, "trust", {**SEVERAL, "epochs": 4, "trust_region": 1e-12})
    assert [step["steps/optimizer"] for step in steps] == [1.0, 1.0]  # the first has moved every token


def test_kl_to_the_start_is_zero_before_the_first_step_and_grows(folder: Path) -> None:
    steps, _ = trained(folder, "meter", {"kl.measure_every": 1})
    assert steps[0]["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert steps[1]["kl/reference"] > 1e-5


@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel": 2, "data_parallel": 2}], ids=["single", "pp2-dp2"])
def test_kl_to_another_model_is_that_of_transformers(folder: Path, place: str, layout: dict[str, int]) -> None:
    from transformers import AutoModelForCausalLM

    from asyncrl.algo.advantage import reinforce_pp
    from asyncrl.algo.samples import build_samples, shares
    from asyncrl.algo.table import build_table

    algo = {"kl.coefficient": 0.3, "kl.estimator": "k2" if place == "loss" else "k1", "kl.place": place}
    algo |= {"kl.reference_path": str(folder / "other" / "model"), "advantage": "reinforce_pp", "entropy_bonus": 0.0}
    algo |= {"correction": None}
    steps, _ = trained(folder, f"kl-{place}-{len(layout)}", algo, **layout)

    table = build_table(drawn_groups(3), 0)
    samples = [sample for group in build_samples(drawn_groups(3)) for sample in group]
    policy, other = (
        AutoModelForCausalLM.from_pretrained(folder / name / "model", dtype=torch.float32)
        for name in ("policy", "other")
    )
    own, theirs = torch.cat([scored(policy, s) for s in samples]), torch.cat([scored(other, s) for s in samples])
    distance = own - theirs.detach()
    if place == "reward":
        table.token_reward.sub_(0.3 * distance.detach().double())
    advantages, weights = reinforce_pp(table), shares(table, samples, "token", 3)
    losses = -(own - own.detach()).exp() * advantages + (0.3 * distance**2 / 2 if place == "loss" else 0.0)
    loss = (weights * losses).sum()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in policy.parameters() if p.grad is not None))
    assert steps[0]["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert steps[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert steps[0]["kl/reference"] == pytest.approx((torch.exp(-distance) - 1 + distance).mean().item(), rel=1e-4)


def scored(model: Any, sample: Any) -> torch.Tensor:
    """Return the log-probabilities of the trained tokens at the temperature of the layout tests."""
    logits = model(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0, len(sample.prompt_ids) - 1 : -1]
    chosen = torch.log_softmax(logits / 0.8, -1).gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
    return chosen[torch.tensor(sample.mask)]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "data_parallel": 2}], ids=["float32", "bfloat16-dp2"])
def test_full_reset_restores_the_first_weights(folder: Path, settings: dict[str, Any]) -> None:
    name = f"reset-{len(settings)}"
    _, weights = trained(folder, name, {}, reusing(reset_every=1, reset_share=1.0), **settings)
    start = load_file(folder / "policy" / "model" / "model.safetensors")
    for key, tensor in weights.items():
        torch.testing.assert_close(tensor, start[key].to(tensor.dtype), rtol=0, atol=0)


def test_past_groups_are_trained_beside_the_batch_and_counted(folder: Path) -> None:
    first, second = trained(folder, "reuse", {}, reusing(groups=3))[0]
    assert (first["sample_reuse/groups"], second["sample_reuse/groups"]) == (0.0, 3.0)
    assert second["groups/trained"] == first["groups/trained"] + 3


GAE: dict[str, Any] = {
    "advantage": {"name": "gae", "discount": 0.9, "gae_lambda": 0.8},
    "entropy_bonus": 0.0,
}
LR = {"lr": 1e-2}


def test_ignorant_critic_gives_plain_returns(folder: Path) -> None:
    """Values start at zero, so the returns are those of GAE with V = 0, and only the head has a gradient."""
    from transformers import AutoModelForCausalLM

    from asyncrl.algo.samples import build_samples, shares
    from asyncrl.algo.table import build_table
    from asyncrl.extensions.critic.value import gae_raw

    first = trained(folder, "critic", GAE, {"critic": {**LR, "value_clip": None}})[0][0]
    table = build_table(drawn_groups(3), 0)
    samples = [sample for group in build_samples(drawn_groups(3)) for sample in group]
    zero = torch.zeros(table.num_tokens, dtype=torch.float64)
    returns = gae_raw(replace(table, values=zero), discount=0.9, gae_lambda=0.8)
    weights = shares(table, samples, "token", 3)
    model = AutoModelForCausalLM.from_pretrained(folder / "policy" / "model", dtype=torch.float32)
    states = torch.cat([states_of(model, sample) for sample in samples]).double()
    of_weight, of_bias = -(weights * returns) @ states, -(weights * returns).sum()
    assert first["critic/loss"] == pytest.approx((weights * returns**2 / 2).sum().item(), rel=1e-5)
    assert first["critic/grad_norm"] == pytest.approx(torch.sqrt((of_weight**2).sum() + of_bias**2).item(), rel=1e-4)
    assert first["critic/value"] == 0.0


def states_of(model: Any, sample: Any) -> torch.Tensor:
    """Return the last hidden state before each trained token."""
    ids = torch.tensor([sample.prompt_ids + sample.token_ids])
    states = model.model(ids).last_hidden_state[0, len(sample.prompt_ids) - 1 : -1]
    return states[torch.tensor(sample.mask)].detach()


def test_critic_learns_and_does_not_depend_on_the_layout(folder: Path) -> None:
    alone = trained(folder, "critic-alone", GAE, {"critic": LR})
    assert alone[0][1]["critic/loss"] < alone[0][0]["critic/loss"]
    for name, layout in {
        "critic-dp2": {"data_parallel": 2},
        "critic-tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
        "critic-pp2": {"pipeline_parallel": 2, "micro_batch_tokens": 60},
    }.items():
        other = trained(folder, name, GAE, {"critic": LR}, **layout)
        same(other, alone, atol=2e-5)
        for mine, theirs in zip(other[0], alone[0], strict=True):
            for figure in ("critic/loss", "critic/grad_norm", "critic/explained_variance"):
                assert mine[figure] == pytest.approx(theirs[figure], rel=1e-3, abs=1e-5), figure


def test_warm_up_trains_the_critic_alone(folder: Path) -> None:
    steps, _ = trained(folder, "warm-up", GAE, {"critic": {**LR, "warmup": 1}})
    assert [step["steps/optimizer"] for step in steps] == [0.0, 1.0]
    assert steps[0]["critic/grad_norm"] > 0
