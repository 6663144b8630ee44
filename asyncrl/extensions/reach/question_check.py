"""Check of the questions of a run, in a process of its own (questions.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncrl.config import Config
from asyncrl.launch.checks.findings import Finding, error

SECONDS = 900.0
"""The deadline for reading all questions."""
LAST_LINES = 5


def check_questions(config: Config, model: Path) -> list[Finding]:
    """Return what the process finds. A user's module may do anything while it is imported; if it ends the process, that
    is reported as an error."""
    with tempfile.TemporaryDirectory() as folder:
        return _asked(config, model, Path(folder) / "found")


def _asked(config: Config, model: Path, out: Path) -> list[Finding]:
    program = [sys.executable, "-m", "asyncrl.extensions.reach.questions", str(model), str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            program,
            input=config.model_dump_json(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"the questions could not be read within {SECONDS:.0f} s"
        return [error("task", text, "The rollout process would hang in the same way: check what the task does.")]
    if done.returncode:
        tail = " | ".join(done.stdout.splitlines()[-LAST_LINES:])
        text = f"reading the questions failed with exit code {done.returncode}: {tail}"
        return [error("task", text, "The rollout process would fail in the same way; these are its last lines.")]
    return [Finding(*json.loads(line)) for line in out.read_text().splitlines()]
