"""Layers of multi-token prediction: their weights survive loading and export, their predictions equal those of a layer
of transformers, and their loss trains nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.models.tiny import write_random_model
from asyncrl_convert.parameters import Structure
from tests.convert.models import add_drafts
from tests.fakes import compose_values
from tests.integration.families import groups
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

LAYERS = 2
MODELS = {"glm4-moe": "glm4_moe", "deepseek-v3": "deepseek_v3"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"mtp": 0.5},
    "tp2": {"mtp": 0.5, "tensor_parallel": 2, "sequence_parallel": True},
    "dp2": {"mtp": 0.5, "data_parallel": 2},
    "ep2": {"mtp": 0.5, "data_parallel": 2, "expert_parallel": 2},
    "without": {},
}
TRAINED = [layout for layout in LAYOUTS if layout != "without"]
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
PREFIX = f"model.layers.{LAYERS}."


def write_model(folder: Path, kind: str) -> None:
    """Write a model of random weights with a layer of multi-token prediction."""
    write_random_model(
        folder, kind, vocab=257, hidden=32, layers=LAYERS, heads=4, kv_heads=4 if kind == "deepseek_v3" else 2,
        intermediate=48, tied=False, seed=1, dtype="float32", max_positions=64, spread=0.15, fields={},
    )  # fmt: skip
    add_drafts(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run every layout on both models."""
    folder = tmp_path_factory.mktemp("mtp")
    for name, kind in MODELS.items():
        write_model(folder / name, kind)
    for layout, changes in LAYOUTS.items():
        trainer = {**compose_values("experiment=tiny")["trainer"], "layers": "local", "dtype": "float32", **changes}
        (folder / f"{layout}.json").write_text(json.dumps({"trainer": trainer, "models": list(MODELS)}))
        run_ranks("rank_mtp.py", str(folder), layout, world=trainer["tensor_parallel"] * trainer["data_parallel"])
    return folder


def predicted(folder: Path) -> Tensor:
    """Return the log-probabilities of all targets, each sample read by itself, with transformers' layer."""
    from transformers import AutoModelForCausalLM

    def read(source: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").float()

    model, tensors = read(folder), load_file(next(folder.glob("*.safetensors")))
    own = {name: tensors[PREFIX + name] for name in OWN}
    last = f"model.layers.{LAYERS - 1}."  # a model whose last layer has the weights of the one after it
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith((last, PREFIX))}
    swapped = {
        last + n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX) and not n.endswith(OWN)
    }
    del swapped[f"{last}embed_tokens.weight"]
    copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-swapped"))
    save_file({**others, **swapped}, next(copy.glob("*.safetensors")), {"format": "pt"})
    layer = read(copy).model.layers[-1]
    eps, found = model.config.rms_norm_eps, []

    def norm(x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, (32,), own[name], eps)

    for sample in (sample for group in groups() for sample in group):
        ids = torch.tensor([*sample.prompt_ids, *sample.token_ids])
        hidden = model.model(ids[None, :-1]).last_hidden_state[0]
        pairs = torch.cat(
            [norm(model.model.embed_tokens(ids[1:-1]), "enorm.weight"), norm(hidden[:-1], "hnorm.weight")], -1
        )
        x = (pairs @ own["eh_proj.weight"].t())[None]
        positions = torch.arange(x.shape[1])[None]
        angles = model.model.rotary_emb(x, positions)
        mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        out = out[0] if isinstance(out, tuple) else out
        logprobs = model.lm_head(norm(out[0], "shared_head.norm.weight")).log_softmax(-1)
        first = len(sample.prompt_ids) - 2
        found.append(logprobs[first:].gather(1, ids[first + 2 :, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", TRAINED)
def test_weights_survive_loading_and_export(results: Path, model: str, layout: str) -> None:
    source = load_file(next((results / model).glob("*.safetensors")))
    exported = load_file(results / f"{layout}-{model}.weights")
    assert source.keys() - exported.keys() == {f"{PREFIX}embed_tokens.weight"}, "a copy, which engines do not read"
    assert all(torch.equal(tensor, source[name]) for name, tensor in exported.items())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", TRAINED)
def test_checkpoints_have_the_keys_of_conversions(results: Path, model: str, layout: str) -> None:
    structure = Structure(json.loads((results / model / "config.json").read_text()))
    keys = {parameter.addresses[0].key for parameter in structure}
    assert set(json.loads((results / f"{layout}-{model}.keys").read_text())) == keys


@pytest.mark.parametrize("model", MODELS)
def test_predictions_equal_those_of_transformers(results: Path, model: str) -> None:
    with torch.no_grad():
        expected = predicted(results / model)
    for layout in ("single", "tp2"):
        found = load_file(results / f"{layout}-{model}.drafts")["logprobs"].float()
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_trains_the_layer_alone(results: Path, model: str) -> None:
    alone, single = (load_file(results / f"{layout}-{model}.gradients") for layout in ("without", "single"))
    for layout in TRAINED:
        found = load_file(results / f"{layout}-{model}.gradients")
        assert {name for name in found if name.startswith(PREFIX)} == found.keys() - alone.keys()
        for name, gradient in alone.items():
            torch.testing.assert_close(found[name], gradient, atol=2e-4, rtol=2e-4, msg=name)
        for name in found.keys() - alone.keys():
            torch.testing.assert_close(found[name], single[name], atol=2e-4, rtol=2e-4, msg=name)
        for name in OWN:
            assert found[PREFIX + name].abs().max() > 1e-4, name


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", TRAINED)
@pytest.mark.parametrize(("dtype", "kind"), [("float32", "with"), ("float32", "broken"), ("bfloat16", "with")])
def test_the_policy_steps_as_it_would_without_the_layer(
    results: Path, model: str, layout: str, dtype: str, kind: str
) -> None:
    """To the bit, unless the layer moves the bounds of the optimizer's shards, so that norms add up in another order.
    The gradients of both are clipped, that of the layer by its own norm, which is larger."""
    found, alone = (load_file(results / f"{layout}-{model}.{dtype}.{which}") for which in (kind, "without"))
    norms, expected = found.pop("norms"), alone.pop("norms")
    exact = {} if LAYOUTS[layout].get("data_parallel", 1) > 1 else {"atol": 0.0, "rtol": 0.0}
    for name, weight in alone.items():
        torch.testing.assert_close(found[name], weight, **exact, msg=name)
    torch.testing.assert_close(norms[:, 0], expected[:, 0], **(exact or {"atol": 0.0, "rtol": 1e-6}))
    torch.testing.assert_close(norms[:, 2], torch.ones(2, dtype=torch.float64), atol=0.0, rtol=1e-3)
    source = load_file(next((results / model).glob("*.safetensors")))
    own = found.keys() - alone.keys()
    assert own == {name for name in source if name.startswith(PREFIX)} - {f"{PREFIX}embed_tokens.weight"}
    if kind == "broken":
        assert norms[:, 1].isnan().all()
        assert all(found[name].isfinite().all() for name in own), "its gradient is dropped"
    else:
        assert (norms[:, 1] > norms[:, 0]).all()
        torch.testing.assert_close(norms[:, 3], torch.ones(2, dtype=torch.float64), atol=0.0, rtol=1e-3)
        assert all(
            not torch.equal(found[f"{PREFIX}{name}"], source[f"{PREFIX}{name}"].to(found[f"{PREFIX}{name}"].dtype))
            for name in OWN
        )
