"""The questions of a run, looked through by a process that may import a tokenizer (rollout/questions.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncrl.config import Config
from asyncrl.launch.preflight.findings import Finding, error

SECONDS = 900.0
"""For reading all questions, of which the longest are rendered."""
LAST_LINES = 5


def check_questions(config: Config, model: Path) -> list[Finding]:
    """What it finds. A module of a user may do anything when it is imported: it ends, or fails, by itself."""
    with tempfile.TemporaryDirectory() as folder:
        return _asked(config, model, Path(folder) / "found")


def _asked(config: Config, model: Path, out: Path) -> list[Finding]:
    program = [sys.executable, "-m", "asyncrl.rollout.questions", str(model), str(out)]
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
        text = f"the questions were not read within {SECONDS:.0f} s"
        return [error("task", text, "The rollout process would wait for them, too: see what the task does.")]
    if done.returncode:
        tail = " | ".join(done.stdout.splitlines()[-LAST_LINES:])
        text = f"reading the questions ended with exit code {done.returncode}: {tail}"
        return [error("task", text, "The rollout process would end so, too: see its last lines.")]
    return [Finding(*json.loads(line)) for line in out.read_text().splitlines()]
