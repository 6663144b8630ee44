"""Learning curves of several settings of one task in one figure: python scripts/study.py STUDY FOLDER

    algorithms    four estimators and losses on the tiny task
    staleness     the staleness that the tiny model tolerates, with each correction
    default       the run of `make run`: SmolLM2-135M learns to sort words (--steps 40)
    lora          the same with all weights and with adapters of four ranks, each with three learning rates, of which
                  the figure shows the best (--steps 40)
    quantized     the tiny task with engines of 8 bits (quantized.format), with and without truncated importance
                  sampling, and by how much the log-probabilities of trainer and engine differ (--steps 60 --seeds 2).
                  Without staleness, so that nothing else makes them differ

Each setting is a complete run of asyncrl-train on real engines, about forty seconds on two cores (`default` and `lora`:
some minutes). The script prints one line of JSON per run, and writes FOLDER/STUDY.svg and FOLDER/STUDY.jsonl. --steps
shortens the runs; --seeds repeats them; --settings runs some of them only; --experiment runs another task, whose name
then belongs to those of the files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

Overrides = list[str]
FIELDS = {"curve": "reward/mean", "gap": "logprob_gap/mean"}
WINDOW = 5  # number of steps that a point of a curve averages
QUIET = ["eval.questions=0"]

ALGORITHMS: dict[str, Overrides] = {
    "GRPO, PPO clip, TIS": [],
    "RLOO, policy gradient": ["algo.advantage=rloo", "algo.loss=policy_gradient"],
    "Dr. GRPO, CISPO": ["algo.advantage=dr_grpo", "algo.loss=cispo", "algo.aggregation=constant"],
    "GRPO, GSPO": ["algo=gspo"],
}
BOUNDS = (0, 2, 8, 16)
CORRECTIONS: dict[str, Overrides] = {
    "none": ["algo.correction=null"],
    "TIS": ["algo.correction=tis"],
    "IcePop": ["algo.correction=icepop", "algo.correction.floor=0.5", "algo.correction.cap=5.0"],
    "OPSM": ["algo.correction=null", "algo.mask.opsm=0.5"],
}
QUANTIZED: dict[str, Overrides] = {
    f"{kind}, {name}": ["rollout.max_staleness=0", f"quantized.format={kind}", *CORRECTIONS[name]]
    for kind in ("none", "int8_simulated", "fp8_simulated")
    for name in ("none", "TIS")
}
RANKS = (1, 4, 16, 64)
RATES = {"all weights": ("5e-6", "1e-5", "2e-5"), **{f"rank {rank}": ("1e-4", "2e-4", "4e-4") for rank in RANKS}}


def settings(study: str) -> dict[str, Overrides]:
    """Return the overrides of each curve of a study, by name."""
    if study == "default":
        return {"SmolLM2-135M, word_sorting": []}
    if study in ("algorithms", "quantized"):
        return ALGORITHMS if study == "algorithms" else QUANTIZED
    if study == "lora":
        adapters = {f"rank {rank}": [f"trainer.lora.rank={rank}"] for rank in RANKS}
        return {
            f"{name}, {rate}": [*adapters.get(name, []), f"trainer.optimizer.lr={rate}"]
            for name, rates in RATES.items()
            for rate in rates
        }
    return {
        f"bound {bound}, {name}": [f"rollout.max_staleness={bound}", *chosen]
        for bound, (name, chosen) in product(BOUNDS, CORRECTIONS.items())
    }


def trained(experiment: str, overrides: Overrides, steps: int, seed: int, extra: Overrides) -> dict[str, list[float]]:
    """Run a training and return each batch's mean reward and its gap of log-probabilities."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        own = [f"experiment={experiment}", f"run.dir={run_dir}", f"run.max_steps={steps}", f"run.seed={seed}", *QUIET]
        done = subprocess.run(
            [sys.executable, "-m", "asyncrl.launch.main", *own, *overrides, *extra], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{overrides} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {name: [line[field] for line in lines] for name, field in FIELDS.items()}


def smooth(runs: list[list[float]]) -> list[float]:
    """Return the mean of all runs over the last WINDOW values, with four digits."""
    values = [statistics.fmean(of_step) for of_step in zip(*runs, strict=True)]
    means = (statistics.fmean(values[max(0, i - WINDOW + 1) : i + 1]) for i in range(len(values)))
    return [float(f"{value:.4g}") for value in means]


def main() -> None:
    """Run every setting, then draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["algorithms", "staleness", "default", "lora", "quantized"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--settings", nargs="*", help="names of settings to run, or their beginnings (default: all)")
    parser.add_argument("--experiment", help="experiment to run (default: tiny, or default for default and lora)")
    parser.add_argument("--overrides", nargs="*", default=[], help="further settings of every run")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    found = []
    experiment = arguments.experiment or ("default" if arguments.study in ("default", "lora") else "tiny")
    file_name = f"{arguments.study}-{arguments.experiment}" if arguments.experiment else arguments.study
    with (arguments.folder / f"{file_name}.jsonl").open("w") as file:
        for name, overrides in settings(arguments.study).items():
            if not name.startswith(tuple(arguments.settings or [""])):
                continue
            runs = [
                trained(experiment, overrides, arguments.steps, seed, arguments.overrides)
                for seed in range(arguments.seeds)
            ]
            curve = smooth([run["curve"] for run in runs])
            gap = {"gap": smooth([run["gap"] for run in runs])} if arguments.study == "quantized" else {}
            found.append({"name": name, "curve": curve, **gap})
            file.write(json.dumps(found[-1]) + "\n")
            file.flush()
            print(json.dumps({"name": name, "at_half": curve[len(curve) // 2], "at_end": curve[-1]}), flush=True)
    curves = best(found) if arguments.study == "lora" else found
    draw(arguments.study, curves, arguments.folder / f"{file_name}.svg")


def best(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, of the curves of each setting with several learning rates, the one with the highest mean of its second
    half."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        settings.setdefault(one["name"].rpartition(", ")[0], []).append(one)
    return [
        max(curves, key=lambda one: statistics.fmean(one["curve"][len(one["curve"]) // 2 :]))
        for curves in settings.values()
    ]


def draw(study: str, found: list[dict[str, Any]], file: Path) -> None:
    """Draw one panel for each bound of the staleness study, reward and gap of quantized engines, or a single panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        panel, _, label = one["name"].rpartition(", ") if study == "staleness" else ("", "", one["name"])
        panels.setdefault(panel, []).append({**one, "label": label})
    if study == "quantized":
        panels |= {"gap": [{**one, "curve": one["gap"]} for one in panels[""]]}
    columns, shared = min(2, len(panels)), study != "quantized"
    figure, axes = pyplot.subplots(-(-len(panels) // columns), columns, squeeze=False, sharey=shared, layout="tight")
    figure.set_size_inches(4.2 * columns + 1, 3.2 * len(axes))
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        for one in curves:
            axis.plot(range(1, len(one["curve"]) + 1), one["curve"], label=one["label"])
        axis.set(title=title, xlabel="batch", ylabel="mean reward")
        if title == "gap":
            axis.set(title="", ylabel="mean gap of log-probabilities", yscale="log")
        axis.legend(fontsize="small")
    figure.savefig(file)


if __name__ == "__main__":
    main()
