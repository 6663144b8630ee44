"""A bucket's file is a safetensors file of its tensors; a disk that does not take it is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.errors import WeightsError
from asyncrl.weights.bucket import fill, nbytes, plan_buckets
from asyncrl.weights.folder import DTYPES, write_stream
from asyncrl.weights.layouts import Pieces
from asyncrl.weights.transports import claim, publish_folder


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    tensors = {
        str(dtype): torch.randint(0, 256, (3, 4, dtype.itemsize), dtype=torch.uint8).view(dtype)[..., 0]
        for dtype in DTYPES
    }
    tensors["empty"] = torch.zeros(0, 4)
    (bucket,) = plan_buckets([(n, t.dtype, t.shape) for n, t in tensors.items()], 10**6)
    flat = torch.empty(nbytes(bucket), dtype=torch.uint8)
    filled = fill(flat, bucket, ((name, Pieces([tensor])) for name, tensor in tensors.items()))
    write_stream(tmp_path / "a.safetensors", bucket, iter(filled.items()), {"kind": "full"})
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        assert read[name].contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8))


def test_full_disk_is_told_and_leaves_no_half_file() -> None:
    (bucket,) = plan_buckets([("t", torch.float32, torch.Size([8]))], 100)
    with pytest.raises(WeightsError, match=r"/dev/full cannot be written: .*No space left"):
        write_stream(Full("/dev/full"), bucket, iter({"t": torch.zeros(8)}.items()))  # type: ignore[arg-type]


class Full(type(Path())):
    """A file on a full disk."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Stays."""


@pytest.mark.parametrize("shared", [None, "/shared"])
def test_runs_have_folders_of_their_own_and_find_them_again(shared: str | None) -> None:
    runs = [Path("/home", name, "runs/main") for name in ("anna", "ben")]
    found = [publish_folder(shared, run) for run in runs]
    assert len(set(found)) == len(found)
    assert {folder.parent for folder in found} == (
        {Path(shared)} if shared else {*runs}
    )  # nobody else owns a folder between
    assert publish_folder(shared, runs[0]) == found[0]


def test_folder_for_weights_is_private_and_claimed_again(tmp_path: Path) -> None:
    folder = tmp_path / "weights" / "run"
    for _ in range(2):
        claim(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list(folder.iterdir()) == []


def test_folder_of_another_user_takes_no_weights(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "mine")
    with pytest.raises(WeightsError, match=r"link belongs to another user, or is a link: remove it, or set another"):
        claim(link)
    theirs = Path("/usr")
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        os.chown(theirs, 12345, 12345)
    with pytest.raises(WeightsError, match=f"^{theirs} belongs to another user"):
        claim(theirs)
