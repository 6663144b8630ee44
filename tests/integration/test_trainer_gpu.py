"""An update on a GPU is that of the CPU in float32, also with activations that are recomputed or in host memory, with
TransformerEngine's layers and with moments in bfloat16; a checkpoint holds every bit of the state on a GPU.

The same tests run with a trainer on a CPU, in float32 and bfloat16.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import load
from asyncrl.models.tiny import write_random_model
from tests.fakes import compose_values
from tests.integration.checkpoints import VERSION, written
from tests.integration.ranks import run_on_gpu, run_ranks
from tests.integration.updates import Outcome, drawn_groups, weights

CUDA = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")],
)
on_both = pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.integration), CUDA])

RECOMPUTED, OFFLOADED = "trainer.recompute.granularity=full", "offload.activations=true"
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {"arch": "qwen3", "kv_heads": 2},
    "latent": {"arch": "deepseek_v3", "kv_heads": 8, "fields": LATENT},
}
"""Models with heads that are wide enough for FlexAttention, which takes at least 16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    sizes = {"vocab": 257, "hidden": 128, "layers": 3, "heads": 8, "intermediate": 256}
    for name, model in MODELS.items():
        write_random_model(made / name / "model", **sizes, tied=False, seed=1, dtype="float32", **model)
        (made / name / "groups.msgpack").write_bytes(msgspec.msgpack.encode(drawn_groups(seed=3)))
    return made


def configure(folder: Path, dtype: str, *changes: str) -> None:
    raw = compose_values("experiment=tiny", *changes)
    raw["trainer"]["dtype"] = dtype
    # a large and smooth update: with a tiny eps, the first steps are signs of rounding
    raw["trainer"]["optimizer"].update(lr=1e-2, eps=1e-3)
    (folder / "config.json").write_text(load(raw).model_dump_json())


def run(device: str, function: str, *arguments: Any) -> Any:
    """Return what a single rank returns."""
    ranks = run_on_gpu(function, *arguments) if device == "cuda" else run_ranks(function, *arguments, world=1)
    return ranks[0]


@cache
def updated(folder: Path, device: str, dtype: str, *changes: str) -> Outcome:
    configure(folder, dtype, *changes)
    name = "-".join([device, dtype, *changes])
    (figures,) = run(device, "updates:two", name, [folder])
    return figures, weights(folder, name)


@on_both
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "figure", "change"), [("float32", 1e-4, 1e-3), ("bfloat16", 0.05, 0.1)])
def test_two_updates_are_those_of_a_cpu_in_float32(
    folder: Path, model: str, dtype: str, figure: float, change: float, device: str
) -> None:
    """`figure` is the tolerance of loss, gradient norm and entropy, `change` that of the weights: the norm of their
    error over the norm of their change. (On CPUs, bfloat16 has 0.003 with AMX and 0.025 with AVX2 alone, and 0.03: a
    fifth of the tokens has most of the gradient.)"""
    outcomes = updated(folder / model, device, dtype), updated(folder / model, "cpu", "float32")
    assert_alike(folder / model, *outcomes, figure, change)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.campaign), CUDA])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("changes", [[RECOMPUTED], [OFFLOADED], [RECOMPUTED, OFFLOADED]], ids=" ".join)
def test_recomputed_or_offloaded_activations_update_alike(
    folder: Path, model: str, changes: list[str], device: str
) -> None:
    other = updated(folder / model, device, "float32", *changes)
    assert_alike(folder / model, other, updated(folder / model, device, "float32"), 1e-5, 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.skipif(not find_spec("transformer_engine_torch"), reason="needs TransformerEngine")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "figure", "change"), [("float32", 1e-4, 1e-3), ("bfloat16", 0.05, 0.1)])
def test_transformer_engine_layers_update_as_local_ones(
    folder: Path, model: str, dtype: str, figure: float, change: float
) -> None:
    fused = updated(folder / model, "cuda", dtype, "trainer.layers=transformer_engine")
    assert_alike(folder / model, fused, updated(folder / model, "cpu", "float32"), figure, change)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.skipif(not find_spec("transformer_engine_torch"), reason="needs TransformerEngine")
def test_moments_in_bfloat16_give_nearly_the_same_updates(folder: Path) -> None:
    low = updated(folder / "grouped", "cuda", "bfloat16", "trainer.optimizer.moments_dtype=bfloat16")
    assert_alike(folder / "grouped", low, updated(folder / "grouped", "cuda", "bfloat16"), 0.02, 0.1)


def assert_alike(folder: Path, outcome: Outcome, reference: Outcome, figure: float, change: float) -> None:
    """Compare two outcomes of the same updates, with these tolerances of figures and weights."""
    (figures, weights), (others, expected) = outcome, reference
    for mine, theirs in zip(figures, others, strict=True):
        assert mine["steps/optimizer"] == 1
        assert mine["tokens/trained"] == theirs["tokens/trained"]
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=figure, abs=figure / 10), name
    before = load_file(folder / "model" / "model.safetensors")
    assert weights.keys() == expected.keys() == before.keys()
    changes, errors = (
        [after[name] - other[name] for name in after] for after, other in ((expected, before), (weights, expected))
    )
    assert norm(errors) < change * norm(changes)


def norm(tensors: list[torch.Tensor]) -> float:
    return float(sum(x.double().square().sum() for x in tensors) ** 0.5)


@on_both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_restores_every_bit(folder: Path, dtype: str, device: str) -> None:
    """The first run trains, writes a checkpoint and trains on; the second one restores it in place of the training."""
    place = folder / "grouped"
    configure(place, dtype, "checkpoint.every=1")
    links = [f"{device}-{dtype}-{number}" for number in range(2)]
    figures = run(device, "recovery:continued", links[0], None, place)
    more = run(device, "recovery:continued", links[1], links[0], place)
    first, again = (written(CheckpointStore(place / link).path(VERSION)) for link in links)
    assert first.keys() == again.keys()
    assert [key for key in first if not torch.equal(first[key], again[key])] == []
    tolerance = 0.0 if device == "cpu" else 1e-5  # sums of a GPU may have another order
    for name in ("loss", "grad_norm", "lr"):
        assert more[0][name] == pytest.approx(figures[0][name], rel=tolerance, abs=tolerance)
    trained, again_trained = (weights(place, link) for link in links)
    for name, tensor in trained.items():
        torch.testing.assert_close(again_trained[name], tensor, rtol=0, atol=tolerance and 1e-2, msg=name)


@pytest.mark.integration
def test_a_rank_finds_packages_of_its_parents_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that were carried to a machine lie outside its site-packages."""
    (tmp_path / "carried").mkdir()
    (tmp_path / "carried" / "__init__.py").write_text("")
    (tmp_path / "carried" / "rank.py").write_text("import asyncrl, tests\n\ndef found(): return __file__")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_on_gpu("carried.rank:found") == [str(tmp_path / "carried" / "rank.py")]
