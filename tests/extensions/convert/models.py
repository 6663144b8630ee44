"""What conversions make of small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.extensions.convert.cli import main
from tests.weights.models import tensors


def add_drafts(folder: Path) -> None:
    """Add a layer of multi-token prediction, with random weights and shapes like the last layer's, and a copy of the
    embedding, as DeepSeek publishes it."""
    file, hf = next(folder.glob("*.safetensors")), json.loads((folder / "config.json").read_text())
    hidden, last = hf["hidden_size"], hf["num_hidden_layers"] - 1
    held, draw = load_file(file), torch.Generator().manual_seed(7)
    own = {"enorm": [hidden], "hnorm": [hidden], "eh_proj": [hidden, 2 * hidden], "shared_head.norm": [hidden]}
    shapes = {
        f"{name}.weight": torch.empty(shape, dtype=held["model.norm.weight"].dtype) for name, shape in own.items()
    }
    prefix = f"model.layers.{last}."
    shapes |= {name.removeprefix(prefix): tensor for name, tensor in held.items() if name.startswith(prefix)}
    drawn = {
        f"model.layers.{last + 1}.{name}": (torch.randn(like.shape, generator=draw) * 0.15).to(like.dtype)
        for name, like in shapes.items()
    }
    copy = {f"model.layers.{last + 1}.embed_tokens.weight": held["model.embed_tokens.weight"].clone()}
    save_file({**held, **drawn, **copy}, file, {"format": "pt"})
    rewritten(folder, num_nextn_predict_layers=1)


def converted(source: Path, *options: str) -> tuple[Path, Path]:
    """The checkpoint of an HF folder, and the HF folder of that."""
    between, back = source.with_name("megatron"), source.with_name("back")
    assert main(["to-megatron", str(source), str(between), "--overwrite", *options]) == 0
    assert main(["to-hf", str(between), str(back), "--overwrite", *options]) == 0
    return between, back


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def described(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: (tensor.dtype, tensor.shape, raw(tensor)) for name, tensor in tensors(folder).items()}


def rewritten(folder: Path, **fields: Any) -> None:
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, **fields}))


def refused(capsys: pytest.CaptureFixture[str], code: int, arguments: list[str]) -> str:
    """The one line of a conversion that must fail and leave nothing."""
    out = Path(arguments[3 if arguments[0] == "merge" else 2])
    before = sorted(out.parent.iterdir())
    capsys.readouterr()
    assert main(arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert sorted(out.parent.iterdir()) == before
    assert lines[-1].startswith("asyncrl-convert: error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def changed(folder: Path, **new: Tensor | None) -> None:
    """The folder's weights with some tensors replaced, added or (None) taken away."""
    held = tensors(folder)
    for name, tensor in new.items():
        if tensor is None:
            del held[name]
        else:
            held[name] = tensor
    save_file(held, folder / "model.safetensors")
