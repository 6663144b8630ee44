"""What the summary of a run says of its estimate and of its plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def estimate_figures(machine: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the estimate in machine.json and its error, for the summary; nothing without an estimate."""
    if not (estimate := machine.get("estimate")):
        return {}
    untrained = estimate["steps"] - summary["steps"]  # cut off by a budget, a target or a signal
    error = (estimate["run"] - untrained * estimate["step"]) / summary["time/total"] - 1
    return {"estimate/step": estimate["step"], "estimate/run": estimate["run"], "estimate/error": error}


def plan_figures(planned: Mapping[str, Any], summary: Mapping[str, Any], *, overlap: bool) -> dict[str, float]:
    """Return what plan.json predicted, for the summary, and how far that is off the run. With weights.overlap the
    trainer does not wait while the engines are paused."""
    seconds = summary["tokens/generated"] / summary["tokens_per_s/generated"]
    paused = 0.0 if overlap else summary["pause/mean"] * summary["steps"] / seconds
    ages = summary["staleness/histogram"]
    measured = {
        "samples_per_s": summary["samples_per_s"],
        "trainer_busy": 1 - summary["share/trainer_idle"] - paused,
        "staleness": sum(int(age) * count for age, count in ages.items()) / sum(ages.values()),
    }
    row = planned["prediction"]
    said = {name: row["staleness_mean" if name == "staleness" else name] for name in measured}
    return {
        **{f"plan/{name}": value for name, value in said.items()},
        "plan/error/samples_per_s": said["samples_per_s"] / measured["samples_per_s"] - 1,
        **{f"plan/error/{name}": said[name] - measured[name] for name in ("trainer_busy", "staleness")},
    }


def planned_line(summary: Mapping[str, Any]) -> str:
    """Return what the plan predicted, what came of it, and the errors."""
    errors = {name: summary[f"plan/error/{name}"] for name in ("samples_per_s", "trainer_busy", "staleness")}
    rate, busy, age = (summary[f"plan/{name}"] for name in errors)
    return (
        f"predicted {rate:.3g} samples/s, measured {summary['samples_per_s']:.3g} "
        f"({errors['samples_per_s']:+.0%}); trainer busy {busy:.0%}, {busy - errors['trainer_busy']:.0%}; "
        f"staleness {age:.1f}, {age - errors['staleness']:.1f}"
    )
