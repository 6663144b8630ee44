"""Models, layouts and batches for real Megatron ranks, and what two updates make of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.algo.samples import Sample
from asyncrl.config import load
from asyncrl.extensions.routing_replay.encoding import RoutingShape, share_prompt
from asyncrl.launch.checks.model import check_model
from asyncrl.models.tiny import write_random_model
from asyncrl.schema import Completion, Group, TokenRows, Trajectory, Turn, VersionSpan
from tests.fakes import changed, compose_values
from tests.integration.ranks import run_ranks

TIED = {"tied": True, "untied": False}
"""Models of test_step.py: whether the embeddings are the head."""
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


def write_models(made: Path) -> Path:
    """Write small random models, each with a batch, into an empty folder, which is returned."""
    sizes = {"vocab": VOCAB, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48}
    for name, model in MODELS.items():
        write_random_model(made / name / "model", **{**sizes, "tied": False, "seed": 1, "dtype": "float32", **model})
        (made / name / "groups.msgpack").write_bytes(msgspec.msgpack.encode(drawn_groups(seed=3)))
    return made


Outcome = tuple[list[dict[str, float]], dict[str, torch.Tensor]]
"""Figures of two updates, and the weights after them."""


def launch(
    folder: Path,
    name: str,
    models: list[str],
    settings: dict[str, Any],
    algo: dict[str, Any] | None = None,
    others: dict[str, Any] | None = None,
) -> dict[str, Outcome]:
    """Make two updates of each model with these settings of the trainer, the algorithm, and other sections."""
    raw = compose_values("experiment=tiny")
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
    folders = [folder / model for model in models]
    figures = run_ranks("updates:two", name, folders, world=config.trainer.world_size)[0]
    return {model: (of_model, weights(folder / model, name)) for model, of_model in zip(models, figures, strict=True)}


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the weights that ranks wrote to out-NAME."""
    files = sorted((folder / f"out-{name}").glob("*.safetensors"))
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def foreign(shape: RoutingShape) -> list[Group]:
    """Return groups of unequal prompts with a common prefix, one with two turns.

    The experts of every token are random.
    """
    draw, chance = random.Random(4), np.random.default_rng(4)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(count)]

    def experts(start: int, end: int) -> TokenRows:
        chosen = chance.random((end - start, len(shape.sparse), shape.experts)).argsort(-1)[..., : shape.topk]
        return TokenRows(start, shape.width, chosen.astype("u1").tobytes())

    def turn(observation: list[int], count: int, start: int, end: int) -> Turn:
        ids = tokens(count)
        written = Completion(ids, [-draw.random() * 6 for _ in ids], [VersionSpan(0, 0, count)], "stop")
        return Turn(observation, msgspec.structs.replace(written, token_rows=experts(start, end)))

    head, groups = tokens(10), []
    for slot in range(5):
        prompt, members = head + tokens(draw.randint(3, 9)), []
        for _ in range(3):
            first = draw.randint(1, 7)
            end = len(prompt) + first - 1
            turns = [turn([], first, 0, end)]
            if draw.random() < 0.5:
                seen = tokens(3)
                turns.append(turn(seen, 4, end, end + 1 + len(seen) + 3))
            members.append(Trajectory(turns, draw.random()))
        groups.append(share_prompt(Group(f"g{slot}", slot, prompt, members, "drawn")))
    return groups


def drawn_samples() -> list[list[Sample]]:
    """Return three groups of four samples; some answers share a prefix."""
    draw = random.Random(0)
    made: list[list[Sample]] = []
    row = 0
    for _ in range(3):
        prompt = [draw.randrange(VOCAB) for _ in range(12)]
        turn = [draw.randrange(VOCAB) for _ in range(6)]
        made.append([])
        for number in range(4):
            answer = turn * (number % 2) + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
            made[-1].append(Sample(prompt, answer, [True] * len(answer), 0, row))
            row += len(answer)
    return made


def token_weights() -> Tensor:
    """Return the factor of each token's log-probability in the loss."""
    last = drawn_samples()[-1][-1]
    return torch.randn(last.first_row + last.num_trained, generator=torch.Generator().manual_seed(0))
