"""SGLang's loaders hold what was published: checksums, and the matrices that latent attention multiplies with.

Two versions of random weights are loaded by SGLang's model runner bucket by bucket (engine_ranks.py), from the buckets
that a publisher plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl import lookup
from asyncrl.config import load
from asyncrl.engine.server import server_argv
from asyncrl.extensions.quantized.codes import FORMATS, CodeChecksums
from asyncrl.parallel import EngineParallel
from asyncrl.platforms import without_gpu
from asyncrl.weights import checksum
from asyncrl.weights.bucket import plan_buckets, unit_of
from asyncrl.weights.checksum import CpuHash, differing
from tests.integration.engine_jobs import EVERYTHING, MODELS, SIZES, engine_of, named, run_jobs, write_model
from tests.integration.publisher import SeededWeights, quantized

pytestmark = pytest.mark.integration

BUCKETS = 6
"""A version comes in this number of buckets, or in a few more."""
WHOLE_BLOCKS = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 512,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
EVERY_SHAPE = EVERYTHING[1]
WITH_SHARED = ("glm4_moe", "deepseek_v3")
"""Models with a shared expert."""


@dataclass(frozen=True)
class Case:
    """What is published to which engine."""

    model: str
    kind: str
    shape: EngineParallel
    fused: bool = False

    def __str__(self) -> str:
        way = "-fused" * self.fused
        return f"{self.model}-{self.kind}-{named(self.shape)}{way}".replace(", ", "-").replace(" ", "-")

    @property
    def folder(self) -> str:
        return f"{self.model}{'-blocks' * (self.kind != 'none')}{'-256' * self.many}"

    @property
    def many(self) -> bool:
        """Whether the model has the only number of experts with which DeepSeek's shared expert is fused."""
        return self.fused and self.model.startswith("deepseek_v3")


FEW = [
    Case("llama", "fp8", EngineParallel(2)),
    Case("qwen3_moe", "int8", EVERY_SHAPE),
    Case("mixtral", "int8", EngineParallel(tp=2, ep=2)),
    Case("deepseek_v3", "fp8", EngineParallel(2)),
    Case("glm4_moe", "none", EngineParallel(2), fused=True),
]
DENSE = [EngineParallel(2), EngineParallel(tp=2, pp=2)]
REPLICATED = [*DENSE, EngineParallel(tp=4, dp=2)]
ROUTED = [EngineParallel(2), EngineParallel(tp=2, ep=2)]
EVERY = [*ROUTED, EngineParallel(tp=4, ep=2, dp=2), EVERY_SHAPE]
SHAPES = {
    "llama": DENSE,
    "qwen2": DENSE,
    "qwen3": REPLICATED,
    "qwen3_moe": EVERY,
    "mixtral": [*ROUTED, EngineParallel(tp=2, pp=2)],
    "glm4_moe": EVERY,
    "deepseek_v3": EVERY,
    "deepseek_v3, whole queries": [EngineParallel(2)],
}
"""Shapes in which the ranks of a model have whole blocks. (Engines on CPUs pad what no multiple of a block divides.)"""
MANY = [
    *(Case(name, kind, shape) for name, shapes in SHAPES.items() for kind in FORMATS for shape in shapes),
    *(Case(name, kind, EngineParallel(2), fused=True) for name in WITH_SHARED for kind in ("none", *FORMATS)),
    *(Case("deepseek_v3", kind, EngineParallel(1)) for kind in ("none", *FORMATS)),
    Case("deepseek_v3", "none", EVERY_SHAPE),
]
CASES = [*FEW, *(case for case in MANY if case not in FEW)]


def write(folder: Path, case: Case) -> None:
    """Write the model's HF folder."""
    model_type, changes = MODELS[case.model]
    if case.kind != "none":
        changes = {**changes, **{k: v for k, v in WHOLE_BLOCKS.items() if k in {*SIZES, *changes}}}
    if case.many:
        changes = {**changes, "n_routed_experts": 256, "hidden_size": 128, "moe_intermediate_size": 256}
    write_model(folder, model_type, changes)


def publishes(folder: Path, kind: str) -> list[Path]:
    """Write two versions as the trainers of this model publish them, as safetensors with the names of each bucket:
    inseparable tensors one after the other."""
    weights: Any = SeededWeights(folder)
    hf = json.loads((folder / "config.json").read_text())
    weights._base = dict(sorted(weights._base.items(), key=lambda item: unit_of(item[0])))
    sent = weights if kind == "none" else quantized(weights, hf, kind, torch.bfloat16)
    size = sum(shape.numel() * dtype.itemsize for _, dtype, shape in sent.described())
    buckets = plan_buckets(sent.described(), size // BUCKETS, together=unit_of)
    names = {"buckets": json.dumps([[entry.name for entry in bucket] for bucket in buckets])}
    files = []
    for weights.version in (1, 2):
        files.append(folder / f"{kind}-{weights.version}.publish")
        if not files[-1].exists():
            save_file({name: pieces.tensor() for name, pieces in sent.stream()}, files[-1], names)
    return files


@dataclass(frozen=True)
class Outcome:
    """What an engine made of the last publish."""

    hf: dict[str, Any]
    sent: dict[str, Tensor]
    """In the order of the buckets."""
    out: Path
    log: Path

    def checksums(self) -> Any:
        """Return those of each rank."""
        assert self.out.exists(), f"{self.out.name}:\n{self.log.read_text()[-5000:]}"
        return json.loads(self.out.read_text())

    def absorbed(self, rank: int) -> dict[str, Tensor]:
        """Return the matrices of latent attention that are no parameters."""
        self.checksums()
        return load_file(f"{self.out}.{rank}.absorbed")


Loaded = dict[Case, Outcome]


@pytest.fixture(scope="module")
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Return what became of the selected cases, all of which are loaded at once."""
    base, jobs, found = tmp_path_factory.mktemp("publishes"), [], {}
    selected = {item.callspec.params["case"] for item in request.session.items if item.path == request.path}
    for case in (case for case in CASES if case in selected):
        folder = base / case.folder
        if not folder.exists():
            write(folder, case)
        config = load(engine_of(case.shape).model_dump(mode="json") | {"quantized": {"format": case.kind}})
        engine, more = config.engine, lookup.engine_arguments(config, gpu=False)
        files, out = publishes(folder, case.kind), base / f"{case}.json"
        job = {
            "args": server_argv(engine, folder, "http://127.0.0.1:30000", gpu=False, seed=0, **more)[3:],
            "env": without_gpu().engine_environment(engine.ranks),
            "out": str(out),
            "published": list(map(str, files)),
        }
        jobs.append({**job, "fused": case.fused})
        with safe_open(files[-1], "pt") as file:
            names = [name for bucket in json.loads(file.metadata()["buckets"]) for name in bucket]
        tensors = load_file(files[-1])
        sent = {name: tensors[name] for name in names}
        found[case] = Outcome(json.loads((folder / "config.json").read_text()), sent, out, base / "jobs.log")
    run_jobs(base, jobs)
    return found


def cases(chosen: Callable[[Case], bool]) -> pytest.MarkDecorator:
    marked = [pytest.param(c, marks=[] if c in FEW else pytest.mark.campaign) for c in CASES if chosen(c)]
    return pytest.mark.parametrize("case", marked, ids=str)


@cases(lambda case: True)
def test_checksums_of_a_second_publish_are_the_expected_ones(
    case: Case, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fused shared expert, by the layout of engines on GPUs."""
    monkeypatch.setitem(checksum.HASHES, "cuda", CpuHash)
    outcome = loaded[case]
    answered = outcome.checksums()
    device: Any = "cuda" if case.fused else "cpu"
    expected = CodeChecksums(outcome.hf, case.shape, dtype=torch.bfloat16, device=device)
    for name, tensor in outcome.sent.items():
        expected.add(name, tensor)
    assert differing(expected.result(), answered) == []
    assert len(answered) == case.shape.ranks
    apart = any(".shared_experts." in name for rank in answered for name in rank)
    assert apart == (case.model.startswith(WITH_SHARED) and not case.fused)


def check_absorbed(outcome: Outcome, case: Case, layer: int, found: dict[str, Tensor], rank: int) -> None:
    """Compare the matrices of one layer with this rank's heads of the published map that they are parts of."""
    hf, name = outcome.hf, f"model.layers.{layer}.self_attn.kv_b_proj.weight"
    values = outcome.sent[name]
    if case.kind != "none":
        form = FORMATS[case.kind]
        values = form.dequantize(values, outcome.sent[name + form.suffix], torch.bfloat16)
    nope, value, ranks = hf["qk_nope_head_dim"], hf["v_head_dim"], case.shape.attention
    heads = values.unflatten(0, (-1, nope + value)).chunk(ranks)[rank % ranks]
    # of int8 SGLang rounds the scales, and their products with the codes, to bfloat16
    within = {"rtol": 2**-7 if case.kind == "int8" else 0.0, "atol": 0.0}
    torch.testing.assert_close(found["w_kc"], heads[:, :nope], **within)
    torch.testing.assert_close(found["w_vc"], heads[:, nope:].transpose(1, 2), **within)


@cases(lambda case: case.model.startswith("deepseek_v3"))
def test_latent_attention_multiplies_what_came_last(case: Case, loaded: Loaded) -> None:
    """With matrices that SGLang derives from a parameter when it loads it. No checksum covers them."""
    outcome = loaded[case]
    for rank in range(case.shape.ranks):
        found = outcome.absorbed(rank)
        layers = case.shape.layers(outcome.hf["num_hidden_layers"], rank // case.shape.tp)
        assert len(found) == 2 * len(layers)
        for layer in layers:
            prefix = f"model.layers.{layer}.self_attn."
            own = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
            check_absorbed(outcome, case, layer, own, rank)
