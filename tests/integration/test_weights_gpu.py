"""Tests of publishing on GPUs: CUDA IPC on one GPU, and NCCL between two. The engine's own checksums verify every
publish."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.models.tiny import write_random_model
from tests.integration.fleet import engines
from tests.integration.publisher import SeededWeights, make, publish


def model(folder: Path) -> Path:
    """Write a small model whose head width GPU kernels support."""
    sizes = {"vocab": 1000, "hidden": 512, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 1024}
    write_random_model(folder, "llama", **sizes, tied=False, seed=0, dtype="bfloat16")  # type: ignore[arg-type]
    return folder


def publish_three(tmp_path: Path, transport: str, *, gpus: int, trainer: str) -> None:
    """Publish three versions with the trainer's half on GPU 0.

    Engines use the GPUs after the trainer's, or GPU 0 if the trainer is on CPU.
    """
    overrides = [
        f"model.path={model(tmp_path / 'model')}",
        "engine.dtype=bfloat16",
        f"trainer.device={trainer}",
        f"weights.transport={transport}",
        "engine.memory_fraction=0.3",
    ]
    with engines(tmp_path, *overrides, gpus=gpus) as fleet:
        for staging in ("full", "stream"):
            weights = fleet.config.weights.model_copy(
                update={"staging": staging, "bucket_mb": 1, "verify_every": 1, "timeout": 60.0}
            )
            config = fleet.config.model_copy(update={"weights": weights})
            source = SeededWeights(fleet.addresses.model, device="cuda:0")
            publisher = make(config, fleet.addresses, source, tmp_path, device="cuda:0")
            for version in (1, 2, 3):
                figures = publish(publisher, version)
                assert figures["engines"] == 1
                assert figures["verify"] > 0
            publisher.fleet.close()


@pytest.mark.gpu
def test_cuda_ipc_brings_every_bit(tmp_path: Path) -> None:
    publish_three(tmp_path, "tensor", gpus=1, trainer="cpu")


@pytest.mark.multi_gpu
def test_nccl_brings_every_bit(tmp_path: Path) -> None:
    publish_three(tmp_path, "distributed", gpus=2, trainer="auto")


@pytest.mark.multi_gpu
def test_cuda_ipc_reaches_an_engine_on_another_gpu(tmp_path: Path) -> None:
    publish_three(tmp_path, "tensor", gpus=2, trainer="auto")
