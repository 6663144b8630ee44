"""The launcher tells before a run how long it will take, from lengths of real prompts, and keeps it for the summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config, load
from asyncrl.extensions.cpu.probe import Rates
from asyncrl.extensions.plan import forecast
from asyncrl.extensions.plan.estimate import Estimate
from asyncrl.extensions.plan.extension import PlanHooks, Plans, PlanSettings
from asyncrl.extensions.plan.summary import estimate_figures
from asyncrl.launch.checks.model_files import read_model
from asyncrl.launch.cluster import cluster_of
from asyncrl.launch.precision import DtypeChoice, Precision
from asyncrl.launch.prepare import Preparation
from asyncrl.metrics.fields import SUMMARY_MACHINE
from asyncrl.metrics.record import dtype_figures
from asyncrl.models import catalog
from tests.fakes import GIVEN, compose_values, tiny_config

RATES = Rates("host", "cpu", {"bfloat16": 1e9, "float32": 1e10}, {"bfloat16": 1e9, "float32": 1e10}, 2, 2.0)
CHOICES = [DtypeChoice(part, "float32", "auto: faster", RATES) for part in ("trainer", "engine")]


def test_tiny_run_is_estimated_from_its_model_and_task() -> None:
    folder = catalog.resolve("builtin:tiny")
    hf = json.loads((folder / "config.json").read_text())
    config = tiny_config()
    slow, fast = tiny_config(**{"trainer.dtype": "bfloat16"}), config
    found = [forecast.forecast(one, folder, hf, Precision(one, CHOICES)) for one in (slow, fast)]
    assert found[0]
    assert found[1]
    assert found[0].trainer == pytest.approx(10 * found[1].trainer)
    assert found[0].engines == found[1].engines


def test_sides_off_a_measured_cpu_are_not_estimated() -> None:
    folder = catalog.resolve("builtin:tiny")
    hf = json.loads((folder / "config.json").read_text())
    config = tiny_config()
    on_gpus = [DtypeChoice("trainer", "bfloat16", "auto: it runs on GPUs"), CHOICES[1]]
    assert forecast.forecast(config, folder, hf, Precision(config, on_gpus)) is None
    given = tiny_config(**GIVEN)
    assert forecast.forecast(given, folder, hf, Precision(given, CHOICES[:1])) is None


def prepared(config: Config, run_dir: Path) -> Preparation:
    """A preparation with these choices."""
    made = Preparation(config, run_dir, cluster_of(config))
    made.chosen = Precision(config, CHOICES)
    return made


def test_summary_compares_the_estimate_with_the_truth(tmp_path: Path) -> None:
    config = tiny_config()
    hooks, run = PlanHooks(PlanSettings()), prepared(config, tmp_path)
    hooks._expected = Estimate(1.0, 2.0, 2.0, 300.0, steps=100)
    run.hooks = [hooks]
    run.begins()
    machine = json.loads((tmp_path / "machine.json").read_text())
    told = dtype_figures(machine)
    assert told == {"dtype/trainer": "float32 (auto: faster)", "dtype/engine": "float32 (auto: faster)"}
    assert told.keys() == {name.replace("<part>", part) for name in SUMMARY_MACHINE for part in ("trainer", "engine")}
    figures = Plans(None).summary(config, tmp_path, {"time/total": 400.0, "steps": 100})
    assert figures == {"estimate/step": 2.0, "estimate/run": 300.0, "estimate/error": -0.25}
    assert figures.keys() <= Plans.summary_metrics.keys()
    assert estimate_figures(machine, {"time/total": 400.0, "steps": 50})["estimate/error"] == -0.5, "it ended early"
    prepared(config, tmp_path).begins()
    assert Plans(None).summary(config, tmp_path, {"time/total": 400.0, "steps": 100}) == {}


class Questions:
    """A task whose questions are told apart by their last word."""

    size = 3

    def question(self, index: int) -> dict[str, Any]:
        system = {"role": "system", "content": "abcd" * 5}
        return {"messages": [system, {"role": "user", "content": "efgh" * 7 + str(index) * 8}]}


def test_groups_of_a_mixture_have_their_mean_size(tmp_path: Path) -> None:
    values = compose_values("experiment=tiny", "+task@tasks.a=copy", "+task@tasks.b=copy")
    values["tasks"]["a"] |= {"group_size": 4, "weight": 3.0}
    values["tasks"]["b"] |= {"group_size": 16, "weight": 1.0}
    assert forecast.workload(load(values), tmp_path).group_size == 7.0


def test_common_beginning_is_counted_in_tokens(tmp_path: Path) -> None:
    task: Any = Questions()
    common, further = forecast._prompt_tokens(
        tiny_config(), tmp_path, {"task": task}
    )  # no tokenizer: four characters a token
    assert common == forecast.PER_MESSAGE + 5 + forecast.PER_MESSAGE + 7
    assert further == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.62, "0.6 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59, "59 s"), (90, "2 min"), (5399, "90 min"), (7200, "2.0 h")],
)
def test_durations_as_people_say_them(seconds: float, text: str) -> None:
    assert forecast.duration(seconds) == text


@pytest.mark.parametrize("checked", [True, False])
def test_console_has_the_estimate_with_and_without_a_check(checked: bool, tmp_path: Path) -> None:
    run = prepared(tiny_config(), tmp_path)
    run.find("model")
    if checked:
        run.place()
        run.weights["model"] = read_model(run.folders["model"], "model.path").weights
        run.read("model")
        told = {one.field: one.value for hooks in run.hooks for one in hooks.preflight(run)}
    lines = run.notes()
    assert lines[0] == "trainer.dtype float32: auto: faster"
    assert lines[-1].startswith("estimate: ")
    assert not checked or told["run.max_steps"] == f"200 steps; {lines[-1]}"


def test_console_has_no_estimate_that_the_check_could_not_make(tmp_path: Path) -> None:
    run = prepared(tiny_config(), tmp_path)
    run.find("model")
    found = {one.field for hooks in run.hooks for one in hooks.preflight(run)}
    assert found - {"versions"} == {"run.dir"}
    assert not any(line.startswith("estimate: ") for line in run.notes())
