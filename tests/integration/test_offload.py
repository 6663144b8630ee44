"""A trainer whose storages leave the device between two updates trains the same bits: Megatron's views of its buffers
survive, float32 masters stay the parameters that they are, and checkpoints are read from host memory.

The device is a CPU, whose storages are moved like those of a GPU (DeviceMemory's stand_in)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_config
from tests.integration.ranks import run_ranks
from tests.integration.updates import VOCAB
from tests.integration.variants import check_offload

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("replicas", [1, 2])  # with 2, Megatron's distributed optimizer
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_offload_between_updates_changes_no_bit(dtype: str, replicas: int, experts: bool, tmp_path: Path) -> None:
    check_offload(tmp_path, dtype, replicas, experts)


def test_quantized_base_leaves_the_device_and_returns(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}
    write_random_model(tmp_path / "model", "llama", vocab=VOCAB, tied=True, seed=1, dtype="bfloat16", **sizes)
    config = tiny_config(**{"trainer.dtype": "bfloat16", "trainer.lora.rank": 4, "trainer.lora.base": "nf4"})
    (found,) = run_ranks("offload:moved", config.trainer, tmp_path / "model", world=1)
    assert found["restored"]
    for update in found["updates"]:
        assert update["published"]
        assert update["saved"]
        assert update["nothing"] == 0
        assert update["weights_alone"] > found["parameters"]
