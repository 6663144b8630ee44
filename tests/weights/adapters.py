"""Random adapters for the small models of tests/convert, and what a model computes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.config.lora import LoraConfig

LINEAR = re.compile(r"model\.layers\..*(_proj|_proj_with_mqa|\.w[123])\.weight")


def lora(**changes: Any) -> LoraConfig:
    settings: dict[str, Any] = {"rank": 4, "alpha": 10.0, "targets": "all", "dropout": 0.1, "rslora": False}
    settings |= {"init": "default", "path": None, "base": "none"}
    return LoraConfig(**{**settings, **changes})


def adapters(model: Path, rank: int = 4, only: str = "") -> dict[str, Tensor]:
    """Adapters of all linear layers whose names end like `only`."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if LINEAR.fullmatch(name) and re.search(f"({only})$", name.removesuffix(".weight")):
            for letter, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                tensor = torch.randn(shape, generator=generator) / 8
                found[name.replace(".weight", f".lora_{letter}.weight")] = tensor
    return found


def merged(model: Path, out: Path, tensors: dict[str, Tensor], scale: float) -> Path:
    """The model with the adapters in its weights, in float32."""
    out.mkdir()
    (out / "config.json").write_bytes((model / "config.json").read_bytes())
    weights = {name: weight.float() for name, weight in load_file(model / "model.safetensors").items()}
    for name in weights:
        a, b = (name.replace(".weight", f".lora_{letter}.weight") for letter in "AB")
        if a in tensors:
            weights[name] += scale * tensors[b] @ tensors[a]
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def loaded(folder: Path) -> Any:
    """The model as transformers loads it, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(torch.arange(40).view(2, 20)).logits
