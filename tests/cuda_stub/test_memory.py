"""A rank holds the bytes that asyncrl/extensions/plan/memory.py says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.cuda_stub.memory import STATE
from tests.cuda_stub.step import CP, DP, EP, ETP, PP, SP, TP, VPP, Case

LAYERS = 12
"""Many enough that one layer's workspace is small beside what all layers keep, as in models that people train."""
BASE = Case(
    "qwen3",
    layers=LAYERS,
    sizes={"hidden": 512, "intermediate": 1024, "vocab": 4096},
    answers=200,
    changes={"trainer.micro_batch_tokens": 2048},
)
LORA = {"trainer.lora.rank": 16, "trainer.lora.dropout": 0.1}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "one rank": (BASE, {}),
    "DP 2": (BASE, {DP: 2}),
    "TP 2, SP": (BASE, {TP: 2, SP: True}),
    "CP 2": (BASE, {CP: 2}),
    "PP 2, first stage": (BASE, {PP: 2}),
    "PP 2, last stage": (replace(BASE, rank=1), {PP: 2}),
    "PP 2, VPP 2": (BASE, {PP: 2, VPP: 2}),
    "TP 2, SP, DP 2": (BASE, {TP: 2, SP: True, DP: 2}),
    "full recomputation": (BASE, {"trainer.recompute.granularity": "full"}),
    "offload": (BASE, {"offload.activations": True}),
    "full recomputation and offload": (
        BASE,
        {"trainer.recompute.granularity": "full", "offload.activations": True},
    ),
    "reference": (BASE, {"algo.kl.coefficient": 0.01}),
    "critic, PP 2, last stage": (replace(BASE, rank=1, layers=2), {"algo.advantage": "gae", PP: 2}),
    "critic": (BASE, {"algo.advantage": "gae"}),
    "adapters": (BASE, LORA),
    "adapters, TP 2, SP": (BASE, {**LORA, TP: 2, SP: True}),
    "adapters, full recomputation": (BASE, {**LORA, "trainer.recompute.granularity": "full"}),
    "adapters on a quantized base, critic": (BASE, {**LORA, "trainer.lora.base": "nf4", "algo.advantage": "gae"}),
    "routed experts": (replace(BASE, model="qwen3_moe"), {}),
    "EP 4, ETP 1": (replace(BASE, model="qwen3_moe"), {TP: 2, SP: True, DP: 2, EP: 4, ETP: 1}),
    "latent attention": (replace(BASE, model="deepseek_v3"), {}),
}
CLOSE = 0.1
"""Allowed relative error of the peak."""


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_the_planner_says(name: str, step: Callable[[Case], dict[str, Any]]) -> None:
    case, changes = CASES[name]
    told = step(replace(case, changes=case.changes | changes))["memory"]
    found, planned = told["found"], told["planned"]
    assert {part: found[part] for part in STATE} == {part: planned[part] for part in STATE}
    ratio = told["peak"] / sum(planned.values())
    print(f"{name}: state {sum(found.values())}, live {told['live']}, peak {told['peak']}, peak / planned {ratio:.3f}")
    assert 1 - CLOSE <= ratio <= 1 + CLOSE


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_most_layers_activations_are_in_host_memory(recomputed: bool, step: Callable[[Case], dict[str, Any]]) -> None:
    """Two layers are on the device; of layers that are recomputed, these are their inputs."""
    changes = BASE.changes | {"trainer.recompute.granularity": "full" if recomputed else "none"}
    without, offloads = (step(replace(BASE, changes=changes | {"offload.activations": on})) for on in (False, True))
    a_layer = without["memory"]["planned"]["activations"] / LAYERS
    if recomputed:
        a_layer = 2 * BASE.sizes["hidden"] * max(map(max, without["passes"]))
    saved = without["memory"]["peak"] - offloads["memory"]["peak"]
    print(f"peak {without['memory']['peak']}, less {saved} with offload: {saved / a_layer:.1f} of {LAYERS} layers")
    assert saved > (LAYERS - 5 if recomputed else LAYERS - 3) * a_layer
    assert offloads["memory"]["live"] == without["memory"]["live"]  # nothing is left over
