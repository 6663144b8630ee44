"""Real runs whose two sides compute in different formats: transfers are exact, and the choice of formats is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.cpu.probe import DTYPES, MARK, Rates
from tests.integration.running import output, run

pytestmark = pytest.mark.integration

SMALL = ["run.max_steps=2", "eval.questions=4", "rollout.batch_groups=4", "rollout.group_size=4"]
HIDDEN = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Hide all instruction sets above AVX2 from torch and oneDNN."""


def dtypes(folder: Path) -> tuple[str, str]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config["trainer"]["dtype"], config["engine"]["dtype"]


@pytest.mark.parametrize(
    ("trainer", "engine"),
    [
        ("bfloat16", "float32"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.campaign),  # test_checksum.py reads bfloat16 engines
    ],
)
def test_sides_may_differ_and_engines_hold_the_trainers_weights(trainer: str, engine: str, tmp_path: Path) -> None:
    """Every publish is verified by the engines' checksums (weights.verify_every). A run that resumes takes the formats
    of the first although its own settings say auto: the machine may be another one now."""
    folder = tmp_path / "run"
    formats = [f"trainer.dtype={trainer}", f"engine.dtype={engine}"]
    kept = [*SMALL, "weights.verify_every=1", "checkpoint.every=1", "resume=auto"]
    run(folder, *kept, *formats)
    assert dtypes(folder) == (trainer, engine)
    if trainer == "float32":
        run(folder, *kept, "trainer.dtype=auto", "engine.dtype=auto", "run.max_steps=3")
        assert dtypes(folder) == (trainer, engine)
        assert "auto: as in the run that it resumes or replays" in output(folder)


def test_auto_is_resolved_told_and_estimated(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, *SMALL, "trainer.dtype=auto", "engine.dtype=auto")
    first = dtypes(folder)
    assert "auto" not in first
    summary = json.loads((folder / "summary.json").read_text())
    text = output(folder)
    for part, dtype in zip(("trainer", "engine"), first, strict=True):
        assert summary[f"dtype/{part}"].startswith(f"{dtype} (auto: ")
        assert f"{part}.dtype {dtype}: auto: " in text
    assert "estimate: " in text
    assert summary["estimate/run"] > 0
    assert summary["estimate/error"] == pytest.approx(summary["estimate/run"] / summary["time/total"] - 1)
    (other,) = set(DTYPES) - {first[0]}
    assert other not in summary["dtype/trainer"].split()[0]


def test_cpu_without_bfloat16_takes_float32_on_both_sides(tmp_path: Path) -> None:
    """The instructions of a newer CPU are hidden from torch and oneDNN."""
    env = {**os.environ, **HIDDEN, "ASYNCRL_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "asyncrl.extensions.cpu.probe", "576x1536"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    rates = Rates.parse(line.split(" ", 3)[-1])
    assert rates.faster("trainer") == rates.faster("engine") == "float32"
    assert rates.slowdown("trainer", "bfloat16") > 2
