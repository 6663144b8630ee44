"""What this folder adds: what a run needs and how long it takes, plans of runs, and changes of runs in progress."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.settings import Rule, value_of

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


class PlanHooks(extension.LaunchHooks):
    """What the planner does in the launcher. Its modules are imported where they are needed."""

    def __init__(self) -> None:
        """Create the hooks of a run that has not been checked."""
        self._checked = False
        self._expected: Estimate | None = None
        self._plan: RunPlan | None = None

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Estimate the duration of the run, and check memory and disks."""
        from asyncrl.extensions.plan import preflight
        from asyncrl.extensions.plan.forecast import in_words
        from asyncrl.launch.checks.findings import ok, refused

        self._checked = True
        yield from (ok("cluster.plan", line) for line in (self._plan.lines() if self._plan else ()))
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
        """Choose the settings that cluster.plan leaves open."""
        from asyncrl.extensions.plan.auto_plan import plan_run

        config, self._plan = plan_run(preparation)
        return config

    def pilot(
        self, config: Config, run_dir: Path, addresses: Addresses, placement: Placement, cluster: Cluster
    ) -> extension.Pilot:
        """Return the controller of cluster.elastic."""
        from asyncrl.extensions.plan.pilot import ElasticPilot

        return ElasticPilot(config, run_dir, addresses, placement, cluster)

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


def _rules(config: Config) -> Iterator[Rule]:
    """Yield the rules of runs that are planned, and of those whose number of engines changes."""
    cluster = config.cluster
    for field in ("nodes", "gpus") if cluster.plan and not cluster.is_local else ():
        why = "cluster.plan divides given machines: set their number and that of their GPUs."
        yield f"cluster.{field}", getattr(cluster, field) is None, why
    if cluster.elastic == "off":
        return
    off, count = ", or set cluster.elastic=off.", config.engine.started + len(config.engine.urls)
    yield "mode", config.mode != "train", f"Only a run that trains can be elastic{off}"
    yield "cluster.placement", cluster.shares_gpus, f"The engines' GPUs are those of the trainers{off}"
    why = f"Decisions need the lengths of episodes: set true{off}"
    yield "metrics.timeline", not config.metrics.timeline, why
    yield "cluster.min_engines", cluster.min_engines > count, f"The run starts with {count} engines: lower it{off}"
    most = cluster.max_engines
    yield "cluster.max_engines", most is not None and most < count, f"It starts with {count}: raise it{off}"


class Plans(extension.Extension):
    """The planner."""

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
        """Check cluster.plan and cluster.elastic."""
        for field, *_, broken, remedy in _rules(config):
            if broken:
                yield ConfigError(field, value_of(config, field), remedy)

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return PlanHooks()

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.plan.admission import AdmissionRoute

        return AdmissionRoute()

    def summary(self, config: Config, run_dir: Path, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Return the errors of the estimate and of the plan."""
        from asyncrl.extensions.plan.summary import estimate_figures, plan_figures
        from asyncrl.network.addresses import MACHINE, PLAN

        found = estimate_figures(json.loads((run_dir / MACHINE).read_text()), figures)
        plan = run_dir / PLAN
        if plan.exists():
            found |= plan_figures(json.loads(plan.read_text()), figures, overlap=config.weights.overlap)
        return found


Own = Plans
