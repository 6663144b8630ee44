"""Checks of tasks, rewards and agents, also of a user's own, and of what they read and send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from asyncrl import tasks
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.findings import Finding, error
from asyncrl.tasks.scores import rewards
from asyncrl.user_code import announced

SECONDS = 900.0
"""The deadline for reading all questions."""
LAST_LINES = 5


def check_files(config: Config) -> list[object]:
    """Refuse tasks, rewards and agents that cannot be built, and a missing chat template. Return the parts that they
    announce to extensions."""
    from asyncrl.rollout.agent import agents  # imports a web server

    with announced() as parts:
        built = tasks.build_all(config)
        rewards(config, built)
        if config.generates:
            agents(config, built, tell=print)
    template = config.model.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        raise ConfigError("model.chat_template", template, "There is no such file: set the path of a jinja file.")
    return parts


def check_questions(config: Config, model: Path) -> list[Finding]:
    """Return what the process finds. A user's module may do anything while it is imported; if it ends the process, that
    is reported as an error."""
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
        text = f"the questions could not be read within {SECONDS:.0f} s"
        return [error("task", text, "The rollout process would hang in the same way: check what the task does.")]
    if done.returncode:
        tail = " | ".join(done.stdout.splitlines()[-LAST_LINES:])
        text = f"reading the questions failed with exit code {done.returncode}: {tail}"
        return [error("task", text, "The rollout process would fail in the same way; these are its last lines.")]
    return [Finding(*json.loads(line)) for line in out.read_text().splitlines()]
