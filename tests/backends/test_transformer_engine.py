"""On a GPU, Megatron runs without TransformerEngine, and a broken TransformerEngine ends a trainer by name.

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

TRAINER = """
import atexit, sys
import torch
torch.cuda.is_available = lambda: True
atexit.register(lambda: print(*(name for name in sys.modules if name == "megatron.core")))
import asyncrl.trainer.__main__
"""

BROKEN = {
    "without its parts": {"__init__.py": "raise AssertionError('TransformerEngine is not installed correctly')"},
    "without PyTorch": {"__init__.py": "__version__ = '2.20.2'", "pytorch.py": "raise ImportError('no extension')"},
    "without CUDA": {"__init__.py": "", "pytorch.py": "raise OSError('libcudnn.so.9: cannot open shared object')"},
}


def ran(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the packages of a folder first."""
    paths = [str(folder), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2])]
    return subprocess.run(
        [sys.executable, *program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_routers_work_without_transformer_engine(tmp_path: Path) -> None:
    found = ran(["-c", ROUTER], tmp_path)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("kind", BROKEN)
def test_a_trainer_on_a_gpu_names_a_broken_transformer_engine_before_it_imports_megatron(
    kind: str, tmp_path: Path
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    for name, text in BROKEN[kind].items():
        (tmp_path / "transformer_engine" / name).write_text(text)
    found = ran(["-c", TRAINER], tmp_path)
    assert found.returncode != 0
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("asyncrl.errors.LaunchError: TransformerEngine is installed but cannot be imported"), last
    assert "requirements/gpu.txt" in last
    assert "megatron" not in found.stdout
