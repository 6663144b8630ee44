"""What processes compute on is chosen once: CUDA, or the platform of an extension. On a GPU, Megatron runs without
TransformerEngine, and a broken TransformerEngine ends a trainer by name.

A subprocess that believes in CUDA imports Megatron without the shim, and runs a router's layer on a CPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl import extension, lookup, platforms

ROUTER = """
import torch
torch.cuda.is_available = lambda: True
from asyncrl import platforms
assert platforms.here() is platforms.CUDA
platforms.here().prepare_trainer()
import megatron.core.fp8_utils
import asyncrl.trainer.model
from megatron.core.transformer.moe.moe_utils import router_gating_linear
hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
scores = router_gating_linear(hidden, weight, None, torch.float32)
scores.sum().backward()
assert torch.equal(scores, hidden @ weight.t())
assert torch.equal(weight.grad, hidden.detach().sum(0).expand(5, 4))
"""

TRAINERS = """
import os, sys, traceback
import torch
torch.cuda.is_available = lambda: True
for folder in sys.argv[1:]:
    if not (child := os.fork()):
        sys.path.insert(0, folder)
        try:
            import asyncrl.trainer.__main__
        except Exception as error:
            print("".join(traceback.format_exception_only(error)).strip(), flush=True)
        print("imported" if "megatron.core" in sys.modules else "not imported", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Trainers that find another TransformerEngine each."""

BROKEN = {
    "without its parts": {"__init__.py": "raise AssertionError('TransformerEngine is not installed correctly')"},
    "without PyTorch": {"__init__.py": "__version__ = '2.20.2'", "pytorch.py": "raise ImportError('no extension')"},
    "without CUDA": {"__init__.py": "", "pytorch.py": "raise OSError('libcudnn.so.9: cannot open shared object')"},
}


def ran(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the packages of a folder first."""
    paths = [str(folder), os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[1])]
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


def test_broken_te_is_named_before_megatron_is_imported(tmp_path: Path) -> None:
    for kind, files in BROKEN.items():
        (tmp_path / kind / "transformer_engine").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / kind / "transformer_engine" / name).write_text(text)
    found = ran(["-c", TRAINERS, *(str(tmp_path / kind) for kind in BROKEN)], tmp_path)
    told = found.stdout.splitlines()
    assert len(told) == 2 * len(BROKEN), found.stdout + found.stderr
    for last, megatron in zip(told[::2], told[1::2], strict=True):
        assert last.startswith("asyncrl.errors.LaunchError: TransformerEngine is installed but cannot be imported"), (
            last
        )
        assert "requirements/gpu.txt" in last
        assert megatron == "not imported"


class Offered(platforms.Platform):
    """A platform of an installed package."""


class Offers(extension.Extension):
    """An extension with it."""

    platform = f"{__name__}:Offered"


def test_installed_platform_comes_before_the_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "installed", lambda: {"own": f"{__name__}:Offers"})
    platforms.without_gpu.cache_clear()
    try:
        assert isinstance(platforms.chosen(gpu=False), Offered)
        assert platforms.chosen(gpu=True) is platforms.CUDA
    finally:
        platforms.without_gpu.cache_clear()
