"""TransformerEngine's FusedAdam, which Megatron takes wherever TransformerEngine is installed, trains as torch's AdamW
does: bias correction, clipping, resets and restored states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.config import load
from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_values
from tests.integration.ranks import run_ranks
from tests.integration.updates import LAYOUTS, MODELS, VOCAB, drawn_groups
from tests.te_stub.settings import BFLOAT16


@pytest.mark.parametrize("dtype", [{}, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["single", "dp2"])
def test_fused_adam_trains_as_torch_does(layout: str, dtype: dict[str, Any], tmp_path: Path) -> None:
    run(layout, dtype, tmp_path)


@pytest.mark.parametrize("layout", ["single", "dp2", "ep2"])
def test_bfloat16_moments_train_alike_and_are_saved_exactly(layout: str, tmp_path: Path) -> None:
    run(layout, BFLOAT16, tmp_path, moments_dtype="bfloat16")


def run(layout: str, dtype: dict[str, Any], folder: Path, **optimizer: Any) -> None:
    """Train a small model with both optimizers."""
    sizes = {"vocab": VOCAB, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 48, "tied": False}
    model = MODELS["qwen3-moe" if layout == "ep2" else "qwen3-untied"]
    write_random_model(folder / "model", **{**sizes, "seed": 1, "dtype": "float32", **model})
    (folder / "groups.msgpack").write_bytes(msgspec.msgpack.encode(drawn_groups(seed=3)))
    values = tiny_values(**{"algo.mini_batches": 2})
    values["trainer"].update({**LAYOUTS[layout], **dtype})
    values["trainer"]["optimizer"].update(eps=1e-3, weight_decay=0.1, clip_grad=0.1, lr=1e-3, **optimizer)
    config = load(values)
    (folder / "config.json").write_text(config.model_dump_json())
    run_ranks("tests.te_stub.ranks:adam", folder, world=config.trainer.world_size)
