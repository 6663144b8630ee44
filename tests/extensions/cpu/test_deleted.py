"""Without this folder, a machine without GPUs is refused in words: by the launcher, by a trainer and by an engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NO_PLATFORM = "This machine has no visible GPU, and no extension offers a platform for it"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of asyncrl without the folder."""
    tree = tmp_path_factory.mktemp("core")
    for name in ("asyncrl", "conf"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tree / "asyncrl/extensions/cpu")
    return tree


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["-m", "asyncrl.launch.main", "experiment=tiny"], f"trainer.device: got 'auto'. {NO_PLATFORM}"),
        (["-m", "asyncrl.trainer", "."], f"LaunchError: {NO_PLATFORM}"),
        (["-m", "asyncrl.engine.serve"], f"LaunchError: {NO_PLATFORM}"),
    ],
    ids=["launcher", "trainer", "engine"],
)
def test_process_without_a_gpu_names_the_missing_platform(core: Path, command: list[str], told: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(core), "CUDA_VISIBLE_DEVICES": "", "ASYNCRL_API_KEY": "", "RANK": "0"}
    done = subprocess.run([sys.executable, *command], cwd=core, env=env, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    output = " ".join((done.stdout + done.stderr).split())
    assert told in output, output
    assert "docs/extensions.md" in output
