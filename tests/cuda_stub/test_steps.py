"""A trainer's updates never mix devices, shapes or number formats on a GPU: in every shipped experiment with the layout
that it names, and in a matrix of layouts and features, on one rank of each class of coordinates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.cuda_stub.experiments import EXPERIMENTS
from tests.cuda_stub.ranks import classes
from tests.cuda_stub.step import CP, DP, EP, ETP, PP, SP, TP, VPP, Case, settings
from tests.fakes import reusing

LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP 2": {DP: 2},
    "TP 2": {TP: 2},
    "TP 2, SP": {TP: 2, SP: True},
    "CP 2": {CP: 2},
    "PP 2": {PP: 2},
    "PP 4": {PP: 4},
    "PP 2, uneven": {PP: 2, "trainer.pipeline_split.first_stage_layers": 1},
    "PP 2, VPP 2": {PP: 2, VPP: 2},
    "TP 2, SP, CP 2, DP 2": {TP: 2, SP: True, CP: 2, DP: 2},
    "TP 2, SP, PP 2, VPP 2, CP 2, DP 2": {TP: 2, SP: True, PP: 2, VPP: 2, CP: 2, DP: 2},
}
SPARSE: dict[str, dict[str, Any]] = {
    "one rank": {},
    "EP 2": {DP: 2, EP: 2},
    "EP 4": {DP: 4, EP: 4},
    "TP 2, SP, ETP 2": {TP: 2, SP: True},
    "TP 2, SP, EP 4, ETP 1": {TP: 2, SP: True, DP: 2, EP: 4, ETP: 1},
    "TP 2, SP, EP 2, ETP 2": {TP: 2, SP: True, DP: 2, EP: 2, ETP: 2},
    "PP 2, EP 2": {PP: 2, DP: 2, EP: 2},
    "PP 2, VPP 2, CP 2, EP 2": {PP: 2, VPP: 2, CP: 2, EP: 2},
}
FEATURES: dict[str, dict[str, Any]] = {
    "KL in the loss": {"algo.kl.coefficient": 0.01, "algo.kl.place": "loss"},
    "KL in the reward, offloaded": {
        "algo.kl.coefficient": 0.01,
        "algo.kl.place": "reward",
        "algo.kl.reference_offload": True,
    },
    "critic": {"algo.advantage": "gae"},
    "entropy": {"algo.entropy_bonus": 0.01},
    "resets": reusing(reset_every=1),
    "four mini-batches, twice": {"algo.mini_batches": 4, "algo.epochs": 2},
    "three parts": {"trainer.batch_parts": 3},
    "chunks of logits": {"trainer.logit_rows": 64},
    "float32": {"trainer.dtype": "float32"},
    "full recomputation": {"trainer.recompute.granularity": "full"},
    "selective recomputation": {
        "trainer.recompute.granularity": "selective",
        "trainer.recompute.modules": ["core_attn", "layernorm", "mlp"],
    },
    "offload of activations": {"offload.activations": True},
    "full recomputation and offload": {
        "trainer.recompute.granularity": "full",
        "offload.activations": True,
    },
    "adapters": {
        "trainer.lora.rank": 8,
        "trainer.lora.dropout": 0.1,
        "trainer.recompute.granularity": "full",
        "algo.kl.coefficient": 0.01,
        **reusing(reset_every=1),
    },
    "all": {
        "algo.advantage": "gae",
        "algo.kl.coefficient": 0.01,
        "algo.entropy_bonus": 0.01,
        **reusing(reset_every=1),
        "algo.mini_batches": 4,
    },
}


OVERLAP = {"trainer.overlap_grad_reduce": True, "trainer.overlap_param_gather": True}
OVERLAPPED = {"overlapped communication": OVERLAP, "three parts, overlapped": OVERLAP | {"trainer.batch_parts": 3}}
WIDE = "TP 2, SP, PP 2, VPP 2, CP 2, DP 2"
MIXED = ("EP 2", "TP 2, SP, EP 4, ETP 1", "PP 2, VPP 2, CP 2, EP 2")

DENSE_CASES = {name: Case("qwen3", changes=changes) for name, changes in LAYOUTS.items()}
FEATURE_CASES = {
    **{f"{feature}, one rank": Case("qwen3", changes=changes) for feature, changes in FEATURES.items()},
    **{
        f"{feature}, {WIDE}: rank {rank}": Case("qwen3", changes=LAYOUTS[WIDE] | changes, rank=rank)
        for feature, changes in {**FEATURES, **OVERLAPPED}.items()
        for rank in (0, 15)  # the first and the last
    },
}
SPARSE_CASES = {
    f"{model}, {splits} loads, {layout}": Case(model, changes=SPARSE[layout], splits=splits)
    for model, splits, layouts in (
        ("qwen3_moe", "skewed", tuple(SPARSE)),
        ("qwen3_moe", "even", MIXED),
        ("deepseek_v3", "skewed", ("one rank", *MIXED)),
    )
    for layout in layouts
}
SPARSE_CASES |= {
    f"adapters, {name}": replace(SPARSE_CASES[name], changes=SPARSE_CASES[name].changes | {"trainer.lora.rank": 8})
    for name in ("qwen3_moe, skewed loads, TP 2, SP, EP 2, ETP 2", "deepseek_v3, skewed loads, TP 2, SP, EP 4, ETP 1")
}


def ranked(cases: dict[str, Case]) -> list[Any]:
    """Return each case once for each class of ranks of its layout."""
    return [
        pytest.param(replace(case, rank=rank), id=f"{name}: rank {rank}")
        for name, case in cases.items()
        for rank in classes(settings(case).trainer)
    ]


def check(found: dict[str, Any]) -> None:
    """Raise unless both updates trained, and everything stayed on the device."""
    assert found["devices"] == ["cuda:0"]
    for figures in found["figures"]:
        assert figures["steps/optimizer"] >= 1
        assert figures["step/bad"] == 0


@pytest.mark.parametrize("case", ranked(EXPERIMENTS))
def test_every_shipped_experiment_trains(case: Case, step: Callable[[Case], dict[str, Any]]) -> None:
    check(step(case))


@pytest.mark.parametrize("case", ranked(DENSE_CASES))
def test_a_dense_model_trains_in_every_layout(case: Case, step: Callable[[Case], dict[str, Any]]) -> None:
    check(step(case))


@pytest.mark.parametrize("case", FEATURE_CASES.values(), ids=FEATURE_CASES)
def test_every_feature_trains(case: Case, step: Callable[[Case], dict[str, Any]]) -> None:
    check(step(case))


BESIDE = {"weights.overlap": True, "rollout.max_staleness": 2, "rollout.lead": 2}
BESIDE_CASES = {
    "one rank": Case("qwen3", changes=BESIDE),
    # without checksums: each rank of the stand-in gets its own as those of the others
    "TP 2, PP 2": Case("qwen3", changes=BESIDE | {TP: 2, SP: True, PP: 2, "weights.verify": False}),
}


@pytest.mark.parametrize("case", ranked(BESIDE_CASES))
def test_batch_is_trained_while_weights_are_staged_not_sent(case: Case, step: Callable[[Case], dict[str, Any]]) -> None:
    """weights.overlap. Staging waits for the device once; nothing is streamed."""
    found = step(case)
    check(found)
    beside = found["beside"]
    assert beside["waits"] == 1
    assert beside["figures"]["steps/optimizer"] >= 1
    assert beside["sent"] == ["cuda:0"] * beside["buckets"]


@pytest.mark.parametrize("case", ranked(SPARSE_CASES))
def test_routed_experts_train_in_every_layout(case: Case, step: Callable[[Case], dict[str, Any]]) -> None:
    check(step(case))
