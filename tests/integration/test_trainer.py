"""Tests of real Megatron on CPU without engines: the update is a function of the batch, whatever the layout."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file

from asyncrl.config import load
from asyncrl.launch.checks import check_model
from asyncrl.launch.main import CONF
from asyncrl.models.tiny import write_random_model
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from tests.fakes import changed
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

VOCAB = 257  # odd: every tensor-parallel layout pads it
UNEVEN = 40  # tokens of a micro-batch: odd numbers of them, and unequal ones on two replicas
UNEQUAL = {
    "first_stage_layers": 3,
    "last_stage_layers": None,
    "account_for_embedding": False,
    "account_for_loss": False,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "unshared": {"share_prompts": False},
    "small-micro-batches": {"micro_batch_tokens": 40},
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2, "micro_batch_tokens": 60},
    "pp2-vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_tokens": UNEVEN},
    "pp2-uneven": {"pipeline_parallel": 2, "micro_batch_tokens": 60, "pipeline_split": UNEQUAL},
    "dp2": {"data_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "cp2-small-micro-batches": {"context_parallel": 2, "micro_batch_tokens": 40},
    "tp2-sp-cp2": {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2},
    "pp2-cp2": {"pipeline_parallel": 2, "context_parallel": 2, "micro_batch_tokens": 60},
    "dp2-cp2": {"data_parallel": 2, "context_parallel": 2},
    "ep2": {"data_parallel": 2, "expert_parallel": 2, "micro_batch_tokens": UNEVEN},
    "tp2-sp-etp1": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1},
    "tp2-sp-ep2": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel": 1,
        "expert_parallel": 2,
    },
    "etp2-ep2": {
        "data_parallel": 4,
        "expert_tensor_parallel": 2,
        "expert_parallel": 2,
        "micro_batch_tokens": UNEVEN,
    },
    "pp2-vpp2-ep2": {
        "pipeline_parallel": 2,
        "virtual_pipeline": 2,
        "data_parallel": 2,
        "expert_parallel": 2,
        "micro_batch_tokens": UNEVEN,
    },
}
SHARED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-tied": {"arch": "llama", "layers": 4, "tied": True},
    "qwen3-untied": {"arch": "qwen3", "layers": 4},
    "qwen3-moe": {
        "arch": "qwen3_moe",
        "layers": 4,
        "fields": {
            "num_experts": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    },
    "glm4-moe": {
        "arch": "glm4_moe",
        "layers": 4,
        # under pp2-vpp2 the first stage, with layers 0 and 2, then holds no expert at all
        "fields": {**SHARED, "first_k_dense_replace": 3, "attention_bias": True, "use_qk_norm": True},
    },
    "deepseek": {
        "arch": "deepseek_v3",
        "layers": 4,
        "kv_heads": 4,
        "fields": {
            **SHARED,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "head_dim": 4,
        },
    },
}
DENSE = ["llama-tied", "qwen3-untied"]
WITHOUT_EXPERTS = [name for name, settings in LAYOUTS.items() if not any("expert" in field for field in settings)]
CASES = [
    *((layout, model) for model in DENSE for layout in WITHOUT_EXPERTS if layout != "single"),
    *((layout, "qwen3-moe") for layout in LAYOUTS if layout not in ("single", "unshared", "tp2", "tp2-pp2")),
    *((layout, model) for model in ("glm4-moe", "deepseek") for layout in ("tp2-sp-ep2", "pp2-vpp2-ep2")),
]  # Megatron trains experts under tensor parallelism with sequence parallelism only


def drawn_groups(seed: int) -> list[Group]:
    """Return groups of unequal prompts and answers, some with tool output in between, one without signal."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(low, high))]

    def completion(ids: list[int]) -> Completion:
        return Completion(ids, [-draw.random() * 6 for _ in ids], [VersionSpan(0, 0, len(ids))], "stop")

    head = tokens(10, 10)
    groups = []
    for slot in range(5):
        trajectories = []
        for _ in range(2 + slot % 3):  # tasks may differ in their group size
            turns = [Turn([], completion(tokens(1, 7)))]
            if draw.random() < 0.4:
                turns.append(Turn(tokens(2, 4), completion(tokens(1, 5))))
            trajectories.append(Trajectory(turns, 0.5 if slot == 2 else draw.random()))
        groups.append(Group(f"g{slot:08d}", slot, head + tokens(3, 9), trajectories, "drawn"))
    return groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write small random models, each with a batch."""
    made = tmp_path_factory.mktemp("layouts")
    sizes = {"vocab": VOCAB, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    for name, model in MODELS.items():
        write_random_model(made / name / "model", **{**sizes, "tied": False, "seed": 1, "dtype": "float32", **model})
        (made / name / "groups.msgpack").write_bytes(msgspec.msgpack.encode(drawn_groups(seed=3)))
    return made


Outcome = tuple[list[dict[str, float]], dict[str, torch.Tensor]]
"""Figures of two updates, and the weights after them."""


@cache
def _updated(folder: Path, layout: str) -> dict[str, Outcome]:
    """Return the outcome of every model that has a case in this layout, from one launch."""
    models = list(MODELS) if layout == "single" else [model for name, model in CASES if name == layout]
    return launch(folder, layout, models, LAYOUTS[layout])


def launch(
    folder: Path,
    name: str,
    models: list[str],
    settings: dict[str, Any],
    algo: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
) -> dict[str, Outcome]:
    """Make two updates of each model with these settings of the trainer, the algorithm, and other sections."""
    with initialize_config_dir(str(CONF), version_base=None):
        raw: Any = OmegaConf.to_container(compose("train", ["experiment=tiny"]), resolve=True)
    raw["trainer"].update(settings)
    changed(raw["algo"], algo or {})
    changed(raw, others or {})
    raw["rollout"]["temperature"] = 0.8
    raw["trainer"]["optimizer"]["eps"] = (
        1e-3  # a smooth update: with a tiny eps, Adam's first steps are signs of rounding
    )
    config = load(raw)
    for model in models:
        check_model(config, json.loads((folder / model / "model" / "config.json").read_text()))
        (folder / model / "config.json").write_text(config.model_dump_json())
    folders = [str(folder / model) for model in models]
    run_ranks("rank_update.py", name, *folders, world=config.trainer.world_size)
    return {model: _outcome(folder / model, name) for model in models}


def _outcome(folder: Path, name: str) -> Outcome:
    files = sorted((folder / f"out-{name}").glob("*.safetensors"))
    weights = {key: tensor for file in files for key, tensor in load_file(file).items()}
    return json.loads((folder / f"figures-{name}.json").read_text()), weights


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_loss_gradient_and_new_weights_do_not_depend_on_the_layout(folder: Path, layout: str, model: str) -> None:
    figures, weights = _updated(folder, layout)[model]
    reference, reference_weights = _updated(folder, "single")[model]
    for mine, theirs in zip(figures, reference, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "logprob_gap/mean",
            "logprob_gap/max",
            "tokens/trained",
            "correction/capped",
        ):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (
                name
            )  # TP sums in another order: 1e-5 here
    assert weights.keys() == reference_weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(
            tensor, reference_weights[name], rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_every_weight_is_trained(folder: Path) -> None:
    """Otherwise, agreement between layouts would mean little."""
    for model, (_, weights) in _updated(folder, "single").items():
        start = load_file(folder / model / "model" / "model.safetensors")
        same = [name for name, tensor in weights.items() if tensor.equal(start[name])]
        assert all(name.endswith("e_score_correction_bias") for name in same), same


@pytest.mark.parametrize(
    ("model", "settings"),
    [("llama-tied", {}), ("glm4-moe", {**LAYOUTS["pp2-vpp2-ep2"], "dtype": "bfloat16"})],
    ids=["one-rank", "bfloat16-experts"],
)
def test_a_bad_step_leaves_the_weights_and_the_schedule_as_they_were(
    folder: Path, model: str, settings: dict[str, Any]
) -> None:
    """The router's bias stays float32 in bfloat16 training, bit for bit."""
    bad = {"bad_grad_norm": 1e-9, "on_bad_step": "skip"}
    figures, weights = launch(folder, "bad", [model], {**settings, **bad})[model]
    assert [step["step/bad"] for step in figures] == [1.0, 1.0]
    assert figures[0]["grad_norm"] == figures[1]["grad_norm"] > 1e-9
    start = load_file(folder / model / "model" / "model.safetensors")
    assert weights.keys() == start.keys()
    for name, tensor in start.items():
        kept = "dtype" not in settings or name.endswith("e_score_correction_bias")
        torch.testing.assert_close(weights[name], tensor if kept else tensor.bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_transformers_and_plain_autograd(folder: Path, name: str) -> None:
    """The reference is an independent implementation: HF's model, one sequence at a time, with the formula written
    out."""
    from transformers import AutoModelForCausalLM

    from asyncrl.algo.advantage import grpo
    from asyncrl.algo.samples import build_samples, shares
    from asyncrl.algo.table import build_table

    model = AutoModelForCausalLM.from_pretrained(folder / name / "model", dtype=torch.float32)
    table, samples = build_table(drawn_groups(3), 0), [s for g in build_samples(drawn_groups(3)) for s in g]
    advantages, weights = grpo(table), shares(table, samples, "token", 3)
    loss = torch.zeros(())
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.token_ids])
        logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / 0.8
        every = torch.log_softmax(logits, -1)
        chosen = every.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        mask = torch.tensor(sample.mask)
        rows = slice(sample.first_row, sample.first_row + sample.num_trained)
        weight = (chosen.detach()[mask] - table.behaviour[rows]).exp().clamp(max=2.0)
        entropy = -(every.exp() * every).sum(-1)[mask]
        ratio = (chosen - chosen.detach()).exp()[mask]
        loss = loss + (weights[rows] * (-weight * ratio * advantages[rows] - 0.01 * entropy)).sum()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None))
    first = _updated(folder, "single")[name][0][0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    assert first["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    transformers_loads_the_export = AutoModelForCausalLM.from_pretrained(
        folder / name / "out-single", dtype=torch.float32
    )
    assert transformers_loads_the_export.config.architectures == model.config.architectures
