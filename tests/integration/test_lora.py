"""Adapters on Megatron equal PEFT's on transformers in every layout, and their frozen base costs nothing."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.models.families import choosing_biases, of_type
from asyncrl.models.tiny import write_random_model
from tests.fakes import changed, reusing, tiny_values
from tests.integration.families import TEXT
from tests.integration.ranks import run_ranks
from tests.integration.updates import VOCAB, drawn_samples, token_weights
from tests.integration.variants import FULL, prepare, run, selective

pytestmark = pytest.mark.integration

RANK, ALPHA, CLIP = 4, 6, 0.5
RECOMPUTED = ["core_attn", "layernorm", "mlp", "moe"]
MODELS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "dense": ("qwen2", True, {}),
    "experts": ("qwen3_moe", False, {"mlp_only_layers": [1]}),
    "latent": ("deepseek_v3", False, {}),
    "some": ("llama", False, {}),
    "after": ("olmo3", False, {}),
    "stacked": ("gpt_oss", False, {}),
}
RECORDS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    family.model_type: (family.model_type, False, {})
    for family in TEXT
    if family.adapters and family.model_type not in {kind for kind, *_ in MODELS.values()}
}
"""All other families that have adapters. (Those of models that see are those of their text models.)"""
DIVIDED = [name for name in MODELS if name != "stacked"]
"""Models whose experts have no biases, which Megatron does not divide."""
TARGETS: dict[str, list[str]] = {"some": ["q_proj", "v_proj", "up_proj"]}
EXPERTS = ["experts", "latent"]
STACKED = [*EXPERTS, "stacked"]
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "single": ({}, [*MODELS, *RECORDS]),
    "full": ({"recompute.granularity": "full"}, list(MODELS)),
    "selective": ({"recompute.granularity": "selective", "recompute.modules": RECOMPUTED}, list(MODELS)),
    "tp2": ({"tensor_parallel": 2, "lora.rslora": True, "lora.alpha": ALPHA / RANK**0.5}, ["dense", "some"]),
    "sp2": (SEQUENCE, DIVIDED),
    "tp4": ({"tensor_parallel": 4}, ["dense", "some"]),
    "sp4": ({**SEQUENCE, "tensor_parallel": 4}, ["dense", "some", "experts"]),
    "pp2": ({"pipeline_parallel": 2, "virtual_pipeline": 2}, list(MODELS)),
    "cp2": ({"context_parallel": 2, "lora.init": "gaussian"}, ["dense", "latent", "after"]),
    "dp2": ({"data_parallel": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}, ["dense", "experts"]),
    "ep2": ({"data_parallel": 2, "expert_parallel": 2}, STACKED),
    "etp2": ({"data_parallel": 2, "expert_tensor_parallel": 2}, EXPERTS),
    "etp1": ({**SEQUENCE, "expert_parallel": 2, "expert_tensor_parallel": 1}, STACKED),
    "dropout": ({"lora.dropout": 0.5}, ["dense"]),
    "bfloat16": ({"dtype": "bfloat16"}, list(MODELS)),
    "four": ({**SEQUENCE, "data_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2}, EXPERTS),
}
SHARDED = ["cp2", "dp2", "ep2", "etp2", "four"]
APART = ["dropout", "bfloat16"]
WORLD = {"tp4": 4, "sp4": 4, "four": 4, **dict.fromkeys(["single", "full", "selective", *APART], 1)}
CASES = [
    pytest.param(layout, model, marks=[pytest.mark.campaign] if layout == "tp4" else [])  # sp4 has its divided heads
    for layout, (_, models) in LAYOUTS.items()
    if layout not in APART
    for model in models
]


def trainer() -> dict[str, Any]:
    """Return the settings of the trainer."""
    step = {"optimizer.clip_grad": CLIP, "optimizer.lr": 1e-2, "optimizer.eps": 1e-3}
    return changed(tiny_values()["trainer"], {"lora.rank": RANK, "lora.alpha": ALPHA, **step})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the models, and adapters of PEFT's shapes with random values for each."""
    made = tmp_path_factory.mktemp("lora")
    sizes = {"hidden": 32, "layers": 4, "heads": 4, "intermediate": 48, "max_positions": 64, "spread": 0.15}
    for seed, (name, (kind, tied, fields)) in enumerate({**MODELS, **RECORDS}.items()):
        kv_heads = 4 if "kv_lora_rank" in of_type(kind).tiny else 2
        write_random_model(
            made / name,
            kind,
            vocab=VOCAB,
            kv_heads=kv_heads,
            tied=tied,
            seed=seed,
            dtype="float32",
            fields=fields,
            **sizes,
        )
        draw = torch.Generator().manual_seed(seed)
        values = {}
        for key, parameter in parameters(peft_model(made / name)).items():
            values[key] = torch.randn(parameter.shape, generator=draw) * 0.1
        save_file(values, made / f"{name}-adapters.safetensors")
    return made


def peft_model(model: Path) -> Any:
    """Return transformers' model with PEFT's adapters on all linear layers but the head and routers."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    linear = {name.rpartition(".")[2] for name, one in base.named_modules() if isinstance(one, torch.nn.Linear)}
    fused = {
        name for name, _ in base.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=TARGETS.get(model.name) or sorted(linear - {"lm_head", "gate"}),
        target_parameters=sorted({".".join(name.split(".")[-2:]) for name in fused}),
        task_type="CAUSAL_LM",
    )
    kind, base.config.model_type = base.config.model_type, "plain"  # else it takes gate_proj and up_proj for experts
    model = peft.get_peft_model(base, config)
    base.config.model_type = kind
    return model


def parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return PEFT's matrices by the names of `Resharder.adapters`."""
    found = {}
    for name, module in model.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            of = name.removeprefix("base_model.model.").replace(".base_layer", "")
            of += f".{module.parameter_name}" if hasattr(module, "parameter_name") else ""
            found |= {f"{of}.lora_A.weight": module.lora_A["default"].weight}
            found |= {f"{of}.lora_B.weight": module.lora_B["default"].weight}
    return found


def logprobs(model: Any) -> Tensor:
    """Return the log-probabilities of all tokens."""
    rows = []
    for one in (one for group in drawn_samples() for one in group):
        every = torch.log_softmax(model(torch.tensor([one.prompt_ids + one.token_ids])).logits[0], -1)
        rows.append(every[len(one.prompt_ids) - 1 : -1].gather(1, torch.tensor(one.token_ids)[:, None])[:, 0])
    return torch.cat(rows)


@cache
def expected(folder: Path, name: str) -> dict[str, Tensor]:
    """Return what PEFT computes, by the names of ranks/lora.py."""
    model = peft_model(folder / name)
    own = parameters(model)
    with torch.no_grad():
        for key, tensor in load_file(folder / f"{name}-adapters.safetensors").items():
            own[key].copy_(tensor)
    settings = trainer()["optimizer"]
    adamw = torch.optim.AdamW(
        own.values(),
        lr=settings["lr"],
        betas=(settings["beta1"], settings["beta2"]),
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
    )
    with torch.no_grad(), model.disable_adapter():
        found = {"base_logprobs": logprobs(model)}
    found["logprobs"] = logprobs(model)
    (-(token_weights() * found["logprobs"]).sum()).backward()
    found |= {f"gradient {key}": one.grad.clone() for key, one in own.items() if one.grad is not None}
    found["norm"] = torch.nn.utils.clip_grad_norm_(own.values(), CLIP)
    adamw.step()
    found |= {f"after {key}": one.detach().clone() for key, one in own.items()}
    merged = model.merge_and_unload()
    merged.save_pretrained(folder / f"{name}-merged")
    found |= {f"merged {key}": tensor for key, tensor in load_file(folder / f"{name}-merged/model.safetensors").items()}
    found |= {f"base {key}": tensor for key, tensor in load_file(folder / f"{name}/model.safetensors").items()}
    return {key: tensor.detach() for key, tensor in found.items()}


@pytest.fixture(scope="module")
def megatron(folder: Path) -> Any:
    """Run each layout once for all its models."""

    @cache
    def run(layout: str) -> None:
        if layout != "single":  # whose checkpoints all others load
            run("single")
        settings, models = LAYOUTS[layout]
        of = changed(trainer(), settings)
        targets = {name: TARGETS.get(name, "all") for name in models}
        (folder / f"{layout}.json").write_text(json.dumps({"trainer": of, "models": targets}))
        run_ranks("lora:compared", folder, layout, world=WORLD.get(layout, 2))

    return run


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_adapters_are_those_of_peft(layout: str, name: str, folder: Path, megatron: Any) -> None:
    reference = expected(folder, name)
    megatron(layout)
    stages = [load_file(file) for file in folder.glob(f"{layout}-{name}-?.out")]
    found = {key: tensor for stage in stages for key, tensor in stage.items()}
    start = {key: found.pop(key) for key in list(found) if key.startswith("start ")}
    check_start(start, load_file(folder / f"single-{name}-0.out"), gaussian=layout == "cp2")
    wanted = {key for key in reference if not (key.startswith("gradient ") and layout in SHARDED)}
    assert found.keys() == wanted
    torch.testing.assert_close(found["norm"], reference["norm"], rtol=1e-4, atol=0)
    assert found["norm"] > 2 * CLIP
    assert not torch.allclose(found["logprobs"], found["base_logprobs"], atol=0.1)
    for key in wanted - {"norm"}:
        atol = 1e-3 if key.startswith("gradient ") else 1e-4
        torch.testing.assert_close(
            found[key], reference[key], rtol=1e-5, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_dropout_changes_gradients_and_no_scores(folder: Path, megatron: Any) -> None:
    megatron("dropout")
    found, reference = load_file(folder / "dropout-dense-0.out"), expected(folder, "dense")
    torch.testing.assert_close(found["logprobs"], reference["logprobs"], rtol=0, atol=1e-4)
    assert abs(found["norm"] - reference["norm"]) > 0.01 * reference["norm"]


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_base_trains_adapters_and_is_merged(name: str, folder: Path, megatron: Any) -> None:
    megatron("bfloat16")
    found, reference = load_file(folder / f"bfloat16-{name}-0.out"), expected(folder, name)
    torch.testing.assert_close(found["norm"], reference["norm"], rtol=0.1, atol=0)
    for key, tensor in reference.items():
        if key.startswith("after "):
            assert found[key].dtype == torch.float32
            assert (found[key] - tensor).abs().mean() < 2e-3, key  # a fifth of the step
        elif key.startswith("merged ") and not key.endswith(choosing_biases()):
            assert found[key].dtype == torch.bfloat16
            torch.testing.assert_close(found[key].float(), tensor, rtol=0.01, atol=0.01)


def check_start(start: dict[str, Tensor], of_one: dict[str, Tensor], *, gaussian: bool) -> None:
    """Assert that B starts at zero and A as PEFT's, with the same values in every layout."""
    assert start
    for key, tensor in start.items():
        if ".lora_B." in key:
            assert not tensor.any()
        elif gaussian:
            assert tensor.std() == pytest.approx(1 / RANK, rel=0.3), key
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.8 * bound < tensor.abs().max() <= bound, key
            assert tensor.equal(of_one[key]), key


@pytest.mark.parametrize(("layout", "model"), [("single", "llama-tied"), ("tp2-sp-ep2", "qwen3-moe")])
def test_base_is_the_reference_and_stays_untouched(layout: str, model: str, tmp_path: Path) -> None:
    """The rank asserts it: with a critic, several steps, resets, dropout, and replayed routing if there are experts."""
    algo = {"algo.advantage": "gae", "algo.kl.measure_every": 1, "algo.kl.coefficient": 0.1}
    reset = {**reusing(reset_every=2, reset_share=0.5), "trainer.lora.rank": RANK, "trainer.lora.dropout": 0.2}
    config = prepare(tmp_path, model, layout, {}, {**algo, **reset, "trainer.optimizer.lr": 1e-2})
    run_ranks("adapted:base_as_reference", tmp_path, world=config.trainer.world_size)


@pytest.mark.parametrize("layout", ["tp2", "tp2-sp"])
def test_dropout_is_the_same_where_activations_are_recomputed(layout: str, tmp_path: Path) -> None:
    algo = {"trainer.lora.rank": RANK, "trainer.lora.dropout": 0.3, "trainer.optimizer.lr": 1e-2}
    run(tmp_path, layout, {"llama-tied": {**FULL, "selective": selective("core_attn", "layernorm", "mlp")}}, **algo)
