"""The checksum that the trainer expects of a GPU engine is the one that the engine computes."""

from __future__ import annotations

import multiprocessing

import pytest
import torch

SIZES = (1, 3, 7, 8192, 8193, 40000)
DTYPES = ("bfloat16", "float32")


def both() -> list[tuple[int, str, str, str]]:
    """Return size, dtype, the hash of the engine's Triton kernel, run by Triton's interpreter, and the trainer's."""
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    from asyncrl.weights.checksum import CudaHash
    from tests.cuda_stub import device

    device.install()
    torch.Tensor.is_cuda = property(lambda _: True)  # type: ignore[assignment, misc]
    found = []
    for size in SIZES:
        for dtype in DTYPES:
            tensor = torch.randn(size).to(getattr(torch, dtype))
            ours = CudaHash()
            for part in (tensor[: size // 2], tensor[size // 2 :]):
                ours.update(part)
            found.append((size, dtype, f"{gpu_tensor_hash(tensor):016x}", ours.hexdigest()))
    return found


def test_the_trainers_hash_equals_that_of_sglangs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which Triton reads when it is imported: a new process
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(both)
    assert len({engine for *_, engine, _ in found}) == len(found), "different tensors have different hashes"
    assert [engine for *_, engine, _ in found] == [ours for *_, ours in found]
