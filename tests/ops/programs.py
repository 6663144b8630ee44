"""Debian's Prometheus, installed or unpacked by `make prometheus`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

UNPACKED = Path(__file__).parents[2] / ".venv" / "prometheus" / "usr" / "bin"


def found(program: str) -> str:
    """Return the path of a program, or skip the test."""
    path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:{UNPACKED}")
    if path is None:
        pytest.skip(f"there is no {program} here: make prometheus")
    return path
