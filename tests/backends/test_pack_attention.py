"""Attention over packs on CPUs; tests/trainer/test_gpu.py holds its values against a dense mask."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_attention_in_bfloat16_works_where_avx512_is_hidden_from_torch() -> None:
    """On a CPU with AVX-512; others are what the variable makes of it."""
    case = ["tests/trainer/test_gpu.py", "-k", "1-600-grouped-dtype1-cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *case],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout
