"""What this folder adds: what a run needs and how long it takes, plans of runs, and changes of runs in progress."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.extensions.timelines.extension import settings_of
from asyncrl.settings import Count, Rule, Section, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from asyncrl.config import Config
    from asyncrl.extensions.plan.auto_plan import RunPlan
    from asyncrl.extensions.plan.estimate import Estimate
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.cluster import Cluster
    from asyncrl.launch.placement import Placement
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses


class PlanSettings(Section):
    """Plans of a run, before and while it works (asyncrl/extensions/plan/README.md)."""

    apply: str | None = None
    """auto: the launcher chooses the number of engines, rollout.lead, rollout.max_running_groups and, on GPUs, the
    parallel layouts, by the number and kind of GPUs or the measured speed of the CPU (docs/operations.md), and keeps
    rollout.max_staleness. A file that asyncrl-plan --json wrote: its overrides are used. What the command line sets is
    kept, and a resumed run keeps the plan that it had."""
    elastic: Literal["off", "advise", "act"] = "off"
    """Watch what limits the run, and decide for more or fewer engines, another lead within the bound, or another
    rollout.max_running_groups if that is a number (docs/operations.md). advise: decisions are only reported, on the
    terminal and in elastic.jsonl; act: they are carried out. Requires timelines.record=true."""
    min_engines: Count = 1
    """Smallest number of engines that plan.elastic leaves."""
    max_engines: Count | None = None
    """Largest number of engines that plan.elastic adds up to; unset: none are added beyond engine.count."""


class PlanHooks(extension.LaunchHooks):
    """What the planner does in the launcher. Its modules are imported where they are needed."""

    def __init__(self, settings: PlanSettings) -> None:
        """Create the hooks of a run that has not been checked."""
        self.plans = settings.apply is not None
        self._settings = settings
        self._checked = False
        self._expected: Estimate | None = None
        self._plan: RunPlan | None = None

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Estimate the duration of the run, and check memory and disks."""
        from asyncrl.extensions.plan import preflight
        from asyncrl.extensions.plan.forecast import in_words
        from asyncrl.launch.checks.findings import ok, refused

        self._checked = True
        yield from (ok("plan.apply", line) for line in (self._plan.lines() if self._plan else ()))
        models = preflight.models_of(prepared)
        if prepared.is_placed and "model" in models:
            yield from refused(partial(self._estimate, prepared), "task")
        if self._expected:
            yield ok("run.max_steps", f"{prepared.config.run.max_steps} steps; {in_words(self._expected)}")
        yield from preflight.check_room(prepared, models)

    def notes(self, prepared: Preparation) -> list[str]:
        """Return the estimate and the plan for the console."""
        from asyncrl.extensions.plan.forecast import in_words

        if not self._checked:
            self._estimate(prepared)
        return [*([in_words(self._expected)] if self._expected else []), *(self._plan.lines() if self._plan else [])]

    def begins(self, prepared: Preparation) -> None:
        """Write plan.json, and add the estimate to machine.json."""
        from asyncrl.extensions.plan import forecast

        if self._plan:
            self._plan.write(prepared.run_dir)
        forecast.write(prepared.run_dir, self._expected)

    def plan(self, preparation: Preparation) -> Config:
        """Choose the settings that plan.apply leaves open."""
        if self._settings.apply is None:
            return preparation.config
        from asyncrl.extensions.plan.auto_plan import plan_run

        config, self._plan = plan_run(preparation, self._settings.apply)
        return config

    def pilot(
        self, config: Config, run_dir: Path, addresses: Addresses, placement: Placement, cluster: Cluster
    ) -> extension.Pilot | None:
        """Return the controller of plan.elastic."""
        if self._settings.elastic == "off":
            return None
        from asyncrl.extensions.plan.pilot import ElasticPilot

        return ElasticPilot(config, self._settings, run_dir, addresses, placement, cluster)

    def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
        """Yield what the plan predicted, what came of it, and the errors."""
        from asyncrl.extensions.plan.summary import planned_line

        summary = json.loads((run_dir / "summary.json").read_text())
        if "plan/samples_per_s" in summary:
            yield "plan", planned_line(summary)

    def _estimate(self, prepared: Preparation) -> None:
        from asyncrl.extensions.plan.forecast import forecast

        chosen, hf = prepared.chosen, prepared.read("model")
        self._expected = forecast(chosen.config, prepared.folders["model"], hf, chosen)


def _rules(config: Config, settings: PlanSettings) -> Iterator[Rule]:
    """Yield the rules of runs that are planned, and of those whose number of engines changes."""
    cluster = config.cluster
    for field in ("nodes", "gpus") if settings.apply and not cluster.is_local else ():
        why = "plan.apply divides given machines: set their number and that of their GPUs."
        yield f"cluster.{field}", getattr(cluster, field) is None, why
    if settings.elastic == "off":
        return
    off, count = ", or set plan.elastic=off.", config.engine.started + len(config.engine.urls)
    yield "mode", config.mode != "train", f"Only a run that trains can be elastic{off}"
    yield "cluster.placement", cluster.shares_gpus, f"The engines' GPUs are those of the trainers{off}"
    why = f"Decisions need the lengths of episodes: set true{off}"
    yield "timelines.record", not settings_of(config).record, why
    why = f"The run starts with {count} engines: lower it{off}"
    yield "plan.min_engines", settings.min_engines, settings.min_engines > count, why
    most = settings.max_engines
    yield "plan.max_engines", most, most is not None and most < count, f"It starts with {count}: raise it{off}"


class Plans(extension.Extension):
    """The planner."""

    Settings = PlanSettings
    trains = False
    summary_metrics = {  # noqa: RUF012
        "estimate/step": "time of a step as estimated before the run from the measured speed of the CPU",
        "estimate/run": "time of the whole run as estimated before it",
        "estimate/error": "relative error of the estimate: the estimate for the trained steps divided by time/total, "
        "minus 1",
        "plan/samples_per_s": "trajectories per second as the plan predicted (plan.json)",
        "plan/trainer_busy": "fraction of the time for which the trainer neither waits for a batch nor for the pause "
        "of a publish, as predicted",
        "plan/staleness": "mean staleness of trained trajectories as predicted",
        "plan/error/samples_per_s": "relative error of the prediction: it divided by samples_per_s, minus 1",
        "plan/error/trainer_busy": "predicted minus measured fraction",
        "plan/error/staleness": "predicted minus measured mean staleness",
    }

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Check plan.apply and plan.elastic."""
        for field, *shown, broken, remedy in _rules(config, self.settings):
            if broken:
                yield ConfigError(field, shown[0] if shown else value_of(config, field), remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return PlanHooks(self.settings)

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.plan.admission import AdmissionRoute

        return AdmissionRoute()

    def summary(self, config: Config, run_dir: Path, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the errors of the estimate and of the plan."""
        from asyncrl.extensions.plan.auto_plan import PLAN
        from asyncrl.extensions.plan.summary import estimate_figures, plan_figures
        from asyncrl.network.addresses import MACHINE

        found = estimate_figures(json.loads((run_dir / MACHINE).read_text()), figures)
        plan = run_dir / PLAN
        if plan.exists():
            found |= plan_figures(json.loads(plan.read_text()), figures, overlap=config.weights.overlap)
        return found


Own = Plans
