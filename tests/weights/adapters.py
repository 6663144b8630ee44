"""Random adapters for small models, and what a model computes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.config.lora import LoraConfig

RANK = 4
EXPERT = re.compile(
    r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(?:(gate_proj|up_proj|w1|w3)|down_proj|w2)\.weight"
)
LAYERS = r"model\.(language_model\.)?layers"  # of a text model, or inside one that sees
STACK = re.compile(rf"{LAYERS}\.\d+\.mlp\.experts\.(gate_up|down)_proj")
LINEAR = re.compile(rf"{LAYERS}\..*(_proj|_proj_with_mqa|\.w[123])\.weight|{STACK.pattern}")


def lora(**changes: Any) -> LoraConfig:
    settings: dict[str, Any] = {"rank": RANK, "alpha": 10.0, "targets": "all", "dropout": 0.1, "rslora": False}
    settings |= {"init": "default", "path": None, "save_merged": False, "base": "none"}
    return LoraConfig(**{**settings, **changes})


def module_of_weight(weight: str) -> str:
    """PEFT's module of a weight; the experts of a layer have one, and its shared experts have transformers' name."""
    if expert := EXPERT.fullmatch(weight):
        return f"{expert[1]}.mlp.experts.{'gate_up' if expert[3] else 'down'}_proj"
    return weight.removesuffix(".weight").replace(".shared_mlp.", ".shared_experts.")


def adapters(model: Path, rank: int = RANK, only: str = "") -> dict[str, Tensor]:
    """Adapters of all linear layers whose names end like `only`."""
    generator = torch.Generator().manual_seed(3)
    rows: Counter[str] = Counter()
    columns: dict[str, int] = {}
    experts: defaultdict[str, set[int]] = defaultdict(set)
    for name, weight in load_file(model / "model.safetensors").items():
        module, expert = module_of_weight(name), EXPERT.fullmatch(name)
        if not LINEAR.fullmatch(name) or not re.search(f"({only})$", module):
            continue
        if STACK.fullmatch(name):  # [experts, in, out]
            experts[module], columns[module], rows[module] = {*range(len(weight))}, *weight.shape[1:]
        else:
            rows[module] += len(weight) if not expert or expert[2] == "0" else 0
            columns[module] = weight.shape[1]
            experts[module].add(int(expert[2]) if expert else 0)
    found = {}
    for module in rows:
        ranks = rank * len(experts[module])
        found[f"{module}.lora_A.weight"] = torch.randn(ranks, columns[module], generator=generator) / 8
        found[f"{module}.lora_B.weight"] = torch.randn(rows[module], ranks, generator=generator) / 8
    return found


def merged(model: Path, out: Path, tensors: dict[str, Tensor], scale: float, rank: int = RANK) -> Path:
    """The model with the adapters in its weights, in float32."""
    out.mkdir()
    (out / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = {name: weight.float() for name, weight in load_file(model / "model.safetensors").items()}
    for name in weights:
        module, expert = module_of_weight(name), EXPERT.fullmatch(name)
        if f"{module}.lora_A.weight" not in tensors:
            continue
        a, b = (tensors[f"{module}.lora_{letter}.weight"] for letter in "AB")
        update = b @ a
        if STACK.fullmatch(name):
            update = torch.einsum("ore,eri->eio", b.unflatten(1, (rank, -1)), a.unflatten(0, (-1, rank)))
        elif expert:
            update = torch.einsum("ore,eri->eoi", b.unflatten(1, (rank, -1)), a.unflatten(0, (-1, rank)))[
                int(expert[2])
            ]
            update = update.chunk(2)[expert[3] in ("up_proj", "w3")] if expert[3] else update
        weights[name] += scale * update
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def loaded(folder: Path) -> Any:
    """The model as transformers loads it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.arange(40).view(2, 20)).logits
