"""Writes scripts/slurm/: the scripts that `asyncrl-train cluster=slurm` creates for a shipped experiment.

    python scripts/render_slurm.py           writes the scripts
    python scripts/render_slurm.py --check   lists those that differ from what the renderer creates now

Users create their own with the same command and slurm.submit=false.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from asyncrl import CONF
from asyncrl import config as configuration
from asyncrl.extensions.slurm.engines import engines_script
from asyncrl.extensions.slurm.extension import settings_of
from asyncrl.extensions.slurm.submit import script
from asyncrl.launch.compose import find_further_confs

FOLDER = Path(__file__).parent / "slurm"
IMAGE = "registry.example.com/asyncrl:latest"
BASE = [
    "experiment=qwen3_8b",
    "model.path=/models/Qwen3-8B",
    "task.train_file=/data/train.jsonl",
    "cluster=slurm",
    "cluster.gpus=8",
]
AGAIN = ["slurm.time=1-00:00:00", "slurm.requeues=10"]
FOUR = [*BASE, *AGAIN, "trainer.data_parallel=8", "rollout.batch_groups=128", "engine.count=16"]  # results/sizes.md
SCRIPTS = {
    "one_node": BASE,
    "several_nodes": FOUR,
    "trainer_nodes": [*FOUR, "cluster.trainer_nodes=2", "cluster.cpu_nodes=1", "+slurm.sbatch.partition=gpu"],
    "pyxis": [*FOUR, "slurm.container.kind=pyxis", f"slurm.container.image={IMAGE}"],
    "apptainer": [*FOUR, "slurm.container.kind=apptainer", "slurm.container.image=/images/asyncrl.sif"],
}
SWEEP = ("trainer.optimizer.lr", ("1e-6", "2e-6", "5e-6"))


def rendered() -> Iterator[tuple[Path, str]]:
    """Yield each file and its text."""
    for name, arguments in SCRIPTS.items():
        yield FOLDER / f"{name}.sbatch", _script(name, arguments).text()
    yield FOLDER / "engines.sbatch", engines_script(settings_of(_config("engines", BASE)), 8, "asyncrl-engines")
    field, values = SWEEP
    yield FOLDER / "sweep.sbatch", _script("sweep", *([*BASE, f"{field}={value}"] for value in values)).text()
    yield FOLDER / "interactive.sh", _script("interactive", FOUR[:-1]).interactive()


def _script(name: str, *runs: list[str]) -> Any:
    folder = Path("runs") / name
    folders = [folder / str(number) for number in range(len(runs))] if len(runs) > 1 else [folder]
    return script(_config(name, runs[0]), list(zip(folders, runs, strict=True)))


def _config(name: str, arguments: list[str]) -> configuration.Config:
    find_further_confs()
    with initialize_config_dir(str(CONF), version_base=None):
        values: Any = OmegaConf.to_container(compose("train", [*arguments, f"run.name={name}"]), resolve=True)
    return configuration.load(values)


def main(check: bool) -> int:
    """Run the script. Return 1 if `check` finds a difference."""
    stale = [(path, text) for path, text in rendered() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        print(f"{'differs' if check else 'wrote'}: {path}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
