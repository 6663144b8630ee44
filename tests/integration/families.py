"""Models and batch of test_families.py, shared with its ranks."""

from __future__ import annotations

import json
from copy import copy
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.algo.samples import Sample
from asyncrl.models.families import choosing_biases, known_families, of_type
from asyncrl.models.tiny import write_random_model
from tests.fakes import compose_values
from tests.integration.ranks import run_ranks

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
SCALED = {key: value for key, value in YARN.items() if "mscale" not in key}
TEXT = [family for family in known_families().values() if not family.tower]
# transformers' model type, tied embeddings, and config fields besides those of the record
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{
        "-".join([family.model_type, *map(str, [number] * (number > 0))]): (
            family.model_type,
            number % 2 == 1,
            dict(fields),
        )
        for family in TEXT
        for number, fields in enumerate(({}, *family.variants))
    },
    "llama-tied": ("llama", True, {}),
    "llama3-rope": ("llama", False, {"rope_parameters": LLAMA3_ROPE}),
    "deepseek-v3-yarn": ("deepseek_v3", False, {"rope_parameters": YARN}),
    "kimi-k2": ("deepseek_v3", False, {"rope_parameters": YARN, "n_group": 1, "topk_group": 1}),
    "olmo3-yarn": ("olmo3", False, {"rope_parameters": SCALED}),
    "gemma3-published": ("gemma3_text", True, {}),
}
"""Each family as its record makes it, and with each of its variants, whose embeddings are tied."""
EXPERTS = [
    name for name, (kind, _, _) in MODELS.items() if any("{expert}" in one.megatron for one in of_type(kind).weights)
]
CHOOSING = [
    name
    for name, (kind, _, _) in MODELS.items()
    if any(one.hf[0].endswith(choosing_biases()) for one in of_type(kind).weights)
]
"""Models whose routers have a bias, which is a buffer without gradient."""


PUBLISHED_AS = {"kimi-k2": "kimi_k2"}
"""Model types in the config.json of publishers that transformers does not know."""


def groups() -> list[list[Sample]]:
    """Return two prompts with a common prefix and two completions each."""
    draw = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 257, (count,), generator=draw).tolist()

    head = tokens(10)
    made = []
    for tail in (3, 6):
        prompt = head + tokens(tail)
        ends = [tokens(count) for count in (5, 8)]
        made.append([Sample(prompt, ids, [True] * len(ids), 0, 0) for ids in ends])
    return made


def factors(group: int, vocab: int) -> Tensor:
    """Return the factors of the logits in the function whose gradient is taken: [T, vocab]."""
    targets = sum(len(sample.token_ids) for sample in groups()[group])
    return torch.randn(targets, vocab, generator=torch.Generator().manual_seed(group)) / targets


WITHOUT_ETP = [
    name
    for name, (kind, _, _) in MODELS.items()
    if any("local_experts" in one.megatron and one.megatron.endswith(".bias") for one in of_type(kind).weights)
]
"""Models with biases of experts, which Megatron does not divide."""
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "single": ({}, list(MODELS)),
    "tp2": ({"tensor_parallel": 2, "sequence_parallel": True}, [name for name in MODELS if name not in WITHOUT_ETP]),
    "tp2-etp1-ep2": (
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 1, "expert_parallel": 2},
        ["gpt_oss"],
    ),
    "tp4": (
        {"tensor_parallel": 4, "sequence_parallel": True},
        ["llama-tied", "qwen2", "qwen3", "qwen3_moe-1", "olmo3"],
    ),
    "pp2": ({"pipeline_parallel": 2}, list(MODELS)),
    "ep2": ({"data_parallel": 2, "expert_parallel": 2}, EXPERTS),
}
CASES = [(layout, model) for layout, (_, models) in LAYOUTS.items() for model in models]


def written(made: Path) -> Path:
    """Write all models into an empty folder, which is returned."""
    for seed, (name, (kind, tied, fields)) in enumerate(MODELS.items()):
        write_random_model(
            made / name,
            kind,
            vocab=257,
            hidden=32,
            layers=4,
            heads=4,
            kv_heads=4 if "kv_lora_rank" in of_type(kind).tiny else 2,
            intermediate=48,
            tied=tied,
            seed=seed,
            dtype="float32",
            max_positions=64,
            spread=0.15,
            fields=fields,
        )
    for name, model_type in PUBLISHED_AS.items():
        retyped(made / name, model_type)
    as_published(made / "gemma3-published")
    return made


def retyped(model: Path, model_type: str) -> None:
    """Write another model type into config.json."""
    hf = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**hf, "model_type": model_type}))


def as_published(gemma: Path) -> None:
    """Write the config.json of a Gemma-3 in the spelling of its publisher, who leaves out what transformers sets."""
    hf = json.loads((gemma / "config.json").read_text())
    for name in ("layer_types", "_sliding_window_pattern", "tie_word_embeddings"):
        del hf[name]
    ropes = hf.pop("rope_parameters")
    hf |= {"rope_theta": ropes["full_attention"].pop("rope_theta"), "rope_scaling": ropes["full_attention"]}
    hf |= {"rope_local_base_freq": ropes["sliding_attention"]["rope_theta"]}
    (gemma / "config.json").write_text(json.dumps(hf))


def launch(folder: Path, layout: str, further: dict[str, Any]) -> None:
    """Run all models of a layout, with further settings of the trainer."""
    settings, models = LAYOUTS[layout]
    trainer = {**compose_values("experiment=tiny")["trainer"], **settings, **further}
    (folder / f"{layout}.json").write_text(json.dumps({"trainer": trainer, "models": models}))
    ranks = trainer["tensor_parallel"] * trainer["pipeline_parallel"] * trainer["data_parallel"]
    run_ranks("passes:families", folder, layout, world=ranks)


def unscale_windows(model: Any) -> None:
    """Give a model of OLMo-3 what transformers 5.12.1 has lost (its pull request 45945): only layers without a window
    scale positions."""
    plain = copy(model.config)
    plain.rope_parameters = {"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"]}
    rotary = type(model.model.rotary_emb)(plain)

    def turned(_: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "position_embeddings": rotary(args[0], kwargs["position_ids"])}

    for layer in model.model.layers:
        if layer.self_attn.attention_type == "sliding_attention":
            layer.register_forward_pre_hook(turned, with_kwargs=True)


@cache
def transformers(folder: Path, name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the logits of every group's targets, and the gradients by HF name."""
    from transformers import AutoModelForCausalLM

    if name in PUBLISHED_AS:
        copytree(folder / name, folder / "known" / name)
        retyped(folder / "known" / name, MODELS[name][0])
    source = folder / "known" / name if name in PUBLISHED_AS else folder / name
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    if name == "olmo3-yarn":
        unscale_windows(model)
    logits = []
    for group in groups():
        rows = []
        for sample in group:
            out = model(torch.tensor([sample.prompt_ids + sample.token_ids])).logits[0]
            rows.append(out[len(sample.prompt_ids) - 1 : -1])
        logits.append(torch.cat(rows))
    sum((found * factors(group, 257)).sum() for group, found in enumerate(logits)).backward()
    for weight in model.parameters():  # transformers itself names the parts of its stacked experts
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    model.save_pretrained(folder / "gradients" / name)
    gradients = load_file(folder / "gradients" / name / "model.safetensors")
    return [found.detach() for found in logits], gradients


def check(folder: Path, layout: str, name: str) -> None:
    """Compare what the ranks of a layout wrote with transformers."""
    logits, gradients = transformers(folder, name)
    replicas = LAYOUTS[layout][0].get("data_parallel", 1)
    for replica in range(replicas):
        mine = load_file(folder / f"{layout}-{name}-{replica}.logits")["logits"]
        torch.testing.assert_close(mine, torch.cat(logits[replica::replicas]), rtol=0, atol=2e-5)
    mine = exported(folder, layout, name)
    expected = {key: tensor for key, tensor in gradients.items() if not key.endswith(choosing_biases())}
    assert {key for key in mine if not key.endswith(choosing_biases())} == expected.keys()
    for key, tensor in expected.items():
        if ".experts." not in key:  # some are chosen by no token of so small a batch
            assert tensor.abs().max() > 1e-3, key
        torch.testing.assert_close(mine[key], tensor, rtol=0, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


def exported(folder: Path, layout: str, name: str) -> dict[str, Tensor]:
    """Return the tensors that the ranks of all pipeline stages wrote: gradients, and the biases that choose experts."""
    stages = [load_file(file) for file in folder.glob(f"{layout}-{name}-?.gradients")]
    return {key: tensor for stage in stages for key, tensor in stage.items()}
