"""Every benchmark for CPUs still runs: what it measures changes with the code, and nothing else executes it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(file.name for file in (ROOT / "scripts").glob("bench_*.py") if file.name != "bench_gpu.py")


@pytest.mark.integration
@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs_and_names_its_machine(script: str, tmp_path: Path) -> None:
    """Its figures mean nothing here, beside other tests."""
    command = [sys.executable, str(ROOT / "scripts" / script), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout.splitlines()[-1])["machine"]["cores"]
