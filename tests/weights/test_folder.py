"""The hash of a model folder is that of its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.weights.folder import HFFolder


def digest(folder: Path, *files: dict[str, Tensor]) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors")
    index = {name: f"{number}.safetensors" for number, tensors in enumerate(files) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with HFFolder(folder) as opened:
        return opened.digest()


def test_digest_depends_on_every_name_shape_type_and_value_and_not_on_files(tmp_path: Path) -> None:
    a, b = torch.arange(6.0).view(2, 3), torch.zeros(4, dtype=torch.bfloat16)
    whole = digest(tmp_path / "whole", {"a": a, "b": b})
    assert digest(tmp_path / "apart", {"b": b}, {"a": a}) == whole
    others: list[dict[str, Tensor]] = [
        {"a": a, "c": b},
        {"a": b, "b": a},
        {"a": a.view(3, 2), "b": b},
        {"a": a, "b": b.view(torch.float16)},
        {"a": a, "b": b + torch.tensor([0, 0, 0, 1e-3]).bfloat16()},
        {"a": a},
    ]
    assert len({whole, *(digest(tmp_path / str(number), one) for number, one in enumerate(others))}) == 7
