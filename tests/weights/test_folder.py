"""The hash of a model folder is that of its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.weights.folder import HFFolder


def digest(folder: Path, *files: dict[str, Tensor]) -> str:
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"{number}.safetensors")
    index = {name: f"{number}.safetensors" for number, tensors in enumerate(files) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with HFFolder(folder) as opened:
        return opened.digest()


def test_digest_depends_on_all_but_files(tmp_path: Path) -> None:
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


def test_mxfp4_is_read_in_bfloat16_by_expert(tmp_path: Path) -> None:
    """The file is as gpt-oss's: two experts of three rows and two blocks of 32; a byte holds two codes, the lower bits
    first, and 127 is the scale 1."""
    blocks = torch.full((2, 3, 2, 16), 0x21, dtype=torch.uint8)  # 0.5, 1.0, 0.5, ...
    blocks[1, 2, 1, 15] = 0xF7  # 6.0, -6.0
    scales = torch.full((2, 3, 2), 127, dtype=torch.uint8)
    scales[1, 2, 1] = 129
    save_file({"experts.w_blocks": blocks, "experts.w_scales": scales}, tmp_path / "model.safetensors")
    expected = torch.tensor([0.5, 1.0]).repeat(32)[None, :, None].repeat(2, 1, 3)
    expected[1, 32:, 2] *= 4
    expected[1, 62:, 2] = torch.tensor([24.0, -24.0])
    with HFFolder(tmp_path) as folder:
        assert folder.names() == ["experts.w"]
        assert folder.described("experts.w").shape == (2, 64, 3)
        assert folder.read("experts.w", (2, 64, 3)).equal(expected.bfloat16())
        assert folder.read("experts.w", (2, 64, 3), 1).equal(expected[1].bfloat16())


def test_fp8_is_read_in_bfloat16_by_block_scale(tmp_path: Path) -> None:
    """The file is as DeepSeek-V3's: 130 x 300 values have 2 x 3 blocks, of which the last are partial."""
    codes = torch.full((130, 300), 0.5).to(torch.float8_e4m3fn)
    codes[129, 299] = 448.0  # the largest
    scales = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 0.25]])
    plain = torch.arange(3.0)
    tensors = {"w.weight": codes, "w.weight_scale_inv": scales, "norm.weight": plain}
    save_file(tensors, tmp_path / "model.safetensors")
    with HFFolder(tmp_path) as folder:
        assert sorted(folder.names()) == ["norm.weight", "w.weight"]
        assert (folder.described("w.weight").dtype, folder.described("w.weight").shape) == (torch.bfloat16, (130, 300))
        found = folder.read("w.weight", (130, 300))
        assert folder.read("norm.weight").equal(plain)
    assert found.dtype == torch.bfloat16
    expected = torch.empty(130, 300)
    for row, column in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)):
        rows, columns = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        expected[rows, columns] = 0.5 * scales[row, column]
    expected[129, 299] = 112.0
    assert found.float().equal(expected)


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(130, 300).to(torch.float8_e4m3fn), torch.ones(2, 2)),
        (torch.zeros(130, 300).to(torch.float8_e5m2), torch.ones(2, 3)),
        (torch.zeros(130, 300, dtype=torch.int8), torch.ones(130, 1)),
    ],
)
def test_codes_of_another_form_are_refused(codes: Tensor, scales: Tensor, tmp_path: Path) -> None:
    save_file({"w.weight": codes, "w.weight_scale_inv": scales}, tmp_path / "model.safetensors")
    with HFFolder(tmp_path) as folder, pytest.raises(WeightsError, match=r"w.weight is .* 128 x 128"):
        folder.read("w.weight")
