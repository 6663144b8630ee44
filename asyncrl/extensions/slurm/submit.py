"""Submission of composed settings as a Slurm job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extensions.slurm.extension import settings_of
from asyncrl.extensions.slurm.script import Script
from asyncrl.launch.placement import imagined, place
from asyncrl.launch.prepare import check_files
from asyncrl.lookup import active

COMMAND = "asyncrl-train"
SBATCH_SECONDS = 60.0


def script(
    config: Config, runs: Sequence[tuple[Path, Sequence[str]]], folder: Path | None = None, command: str = COMMAND
) -> Script:
    """Create the script of a run, or of several that differ only in their arguments. Raises ConfigError if the machines
    of the job could not hold the run."""
    nodes, each = job_size(config)
    if not any(one.launch().plans for one in active(config).values()):  # plans are made in the job
        place(config, imagined(config, nodes, each))
    return Script(config.run.name, settings_of(config), config.cluster, nodes, each, folder, command, runs)


def job_size(config: Config) -> tuple[int, int]:
    """Return how many machines a job that is not submitted yet needs, and how many GPUs each has. Raises ConfigError if
    the settings do not say the latter, or if such machines cannot hold the run."""
    each = config.cluster.gpus
    if each is None:
        remedy = "A job requires the number of GPUs of each machine; set 0 for none."
        raise ConfigError("cluster.gpus", None, remedy)
    return config.cluster.nodes or nodes_wanted(config, each), each


def nodes_wanted(config: Config, each: int) -> int:
    """Return the smallest number of machines with `each` GPUs that can hold the run."""
    problem: ConfigError | None = None
    most = config.trainer.world_size + sum(fleet.ranks * fleet.started for fleet in config.fleets.values()) + 1
    for count in range(1 + config.cluster.cpu_nodes, config.cluster.cpu_nodes + most):
        try:
            place(config, imagined(config, count, each))
        except ConfigError as error:
            problem = error
        else:
            return count
    assert problem
    raise problem


def submit(config: Config, runs: Sequence[tuple[Path, Sequence[str]]]) -> str:
    """Write the script, and submit it to Slurm if slurm.submit is set. Return the message for the user."""
    check_files(config)
    command = shutil.which(COMMAND) or str(Path(sys.executable).with_name(COMMAND))
    made = script(config, runs, Path.cwd(), command)
    text, path = made.text(), made.path
    for run_dir, _ in runs:
        (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if not made.slurm.submit:
        return f"wrote {path}; submit it with: sbatch {path}"
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], capture_output=True, text=True, timeout=SBATCH_SECONDS, check=False
        )
    except FileNotFoundError:
        remedy = "sbatch was not found: run the command where Slurm is installed, or set slurm.submit=false."
        raise ConfigError("cluster.launcher", "slurm", remedy) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"sbatch did not answer within {SBATCH_SECONDS:.0f} s; the script is {path}") from None
    if done.returncode:
        raise LaunchError(f"sbatch rejected {path}: {done.stderr.strip()}")
    number = done.stdout.strip().partition(";")[0]
    output = f"{number}_*.out" if len(runs) > 1 else f"{number}.out"  # one per task of an array
    return f"submitted job {number}; its output: {path.parent}/{output}, its script: {path}"
