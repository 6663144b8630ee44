"""A run with adapters goes on after a kill as if nothing had happened, and leaves one adapter in every form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.convert.cli import main as convert
from tests.integration.running import run
from tests.integration.test_resume import STEPS, Blow, check_books, check_replay, go_on_to_the_end, tensors

pytestmark = pytest.mark.integration

ADAPTERS = [
    *("trainer.lora.rank=4", "trainer.lora.save_merged=true", "trainer.optimizer.lr=1e-2", "trainer.dtype=float32"),
    *("weights.lora=merged", "trainer.data_parallel=2"),
]


def test_a_run_with_adapters_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    Blow("everything", 5, 0.15).strike(run_dir, *ADAPTERS)
    text = go_on_to_the_end(run_dir, *ADAPTERS)
    assert "resuming from" in text
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *ADAPTERS)
    check_forms(run_dir, tmp_path)
    check_start(run_dir, tmp_path)


def check_forms(run_dir: Path, tmp_path: Path) -> None:
    """Check that the last checkpoint and the exported folders hold the same adapter, and that PEFT computes with it
    what the merged weights compute."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = json.loads((run_dir / "addresses.json").read_text())["model"]
    checkpoint = CheckpointStore(run_dir).path(STEPS)
    assert convert(["to-peft", str(checkpoint), str(tmp_path / "peft")]) == 0
    held, exported = tensors(tmp_path / "peft"), tensors(run_dir / "hf")
    assert held.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in held.items())
    configs = [
        json.loads((folder / "adapter_config.json").read_text()) for folder in (tmp_path / "peft", run_dir / "hf")
    ]
    assert configs[0] == configs[1]

    def logits(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.arange(10)[None]).logits

    def load(folder: Path | str) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    adapted, merged = PeftModel.from_pretrained(load(model), run_dir / "hf"), load(run_dir / "hf-merged")
    torch.testing.assert_close(logits(adapted), logits(merged), atol=1e-4, rtol=0)
    assert not torch.allclose(logits(merged), logits(load(model)), atol=1e-2)


def check_start(run_dir: Path, tmp_path: Path) -> None:
    """Check that a new run starts from the exported folder."""
    settings = ["run.max_steps=1", "eval.questions=8", "trainer.lora.rank=4", f"trainer.lora.path={run_dir / 'hf'}"]
    run(tmp_path / "next", *settings, "trainer.dtype=float32", "trainer.optimizer.lr=1e-30")
    held, exported = tensors(run_dir / "hf"), tensors(tmp_path / "next/hf")
    assert held.keys() == exported.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in held.items())
