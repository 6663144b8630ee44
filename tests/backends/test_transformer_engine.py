"""Megatron runs on a GPU whether TransformerEngine is installed, missing or broken.

A subprocess that believes in CUDA imports Megatron without the shim, and runs a router's layer on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROUTER = """
import torch
torch.cuda.is_available = lambda: True
from asyncrl.backends.cpu import megatron_shim
assert not megatron_shim.enable()
import megatron.core.fp8_utils
import asyncrl.trainer.model
from megatron.core.transformer.moe.moe_utils import router_gating_linear
hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
scores = router_gating_linear(hidden, weight, None, torch.float32)
scores.sum().backward()
assert torch.equal(scores, hidden @ weight.t())
assert torch.equal(weight.grad, hidden.detach().sum(0).expand(5, 4))
"""

BROKEN = {
    "without its parts": {"__init__.py": "raise AssertionError('TransformerEngine is not installed correctly')"},
    "without PyTorch": {"__init__.py": "__version__ = '2.20.2'", "pytorch.py": "raise ImportError('no extension')"},
    "without CUDA": {"__init__.py": "", "pytorch.py": "raise OSError('libcudnn.so.9: cannot open shared object')"},
}


@pytest.mark.parametrize("kind", ["missing", *BROKEN])
def test_routers_work_without_transformer_engine(kind: str, tmp_path: Path) -> None:
    for name, text in BROKEN.get(kind, {}).items():
        (tmp_path / "transformer_engine").mkdir(exist_ok=True)
        (tmp_path / "transformer_engine" / name).write_text(text)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    found = subprocess.run(
        [sys.executable, "-c", ROUTER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert ("TransformerEngine is installed but cannot be imported" in found.stderr) == (kind in BROKEN)
