"""A plan as a table, as JSON, as a plot, and as overrides of asyncrl-train."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl.planner.laws import Prediction
from asyncrl.planner.search import Candidate, Plan
from asyncrl.planner.simulation import SimulationResult

WIDTH, HEIGHT, MARGIN = 720, 400, 60
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f")
COLUMNS = (
    "",
    "engines",
    "trainer",
    "bound, lead",
    "samples/s",
    "laws",
    "trainer busy",
    "engines busy",
    "staleness",
    "binds",
    "GB",
)
REMEDY = {
    "trainer": "more trainer GPUs, or a shorter publish",
    "engines": "more engines",
    "concurrency": "a larger lead or batch",
    "order": "more slack (bound minus lead), a larger bound, or shorter longest episodes",
}


def show(plan: Plan, notes: Sequence[str] = ()) -> None:
    """Print the table, the findings, notes about the input, and the overrides."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    table = Table(*COLUMNS)
    for name, one in _named(plan):
        table.add_row(*_cells(name, _row(one)))
    console.print(table)
    for line in (*findings(plan), *notes):
        console.print(line)
    console.print(" ".join(overrides(chosen(plan))), markup=False)


def findings(plan: Plan) -> Iterator[str]:
    """Yield what binds, what one more GPU gives, whether synchronous is better, and how uncertain this is."""
    best = plan.best
    yield f"The {best.law.binds} law binds: what helps is {REMEDY[best.law.binds]}."
    yield f"One more GPU adds {plan.more_engine:+.3g} samples/s to engines, {plan.more_trainer:+.3g} to the trainer."
    if plan.colocated:
        ratio = best.rate / plan.colocated.rate
        better = "use that: it is on-policy and no slower" if plan.synchronous else "so asynchronous is better"
        yield f"It is {ratio:.2f} x as fast as the synchronous run that uses all GPUs in turns, {better}."
    if best.simulated:
        yield (
            f"Uncertainty: {best.spread:.1%} between seeds; the laws are {best.law_error:+.1%} off the simulation. "
            "Inputs that are wrong weigh more."
        )
    else:
        yield "Nothing was simulated: the laws alone are usually within 5 %, but can be far off (docs/planning.md)."


def chosen(plan: Plan) -> Candidate:
    """Return what to run."""
    return plan.colocated if plan.colocated and plan.synchronous else plan.best


def overrides(one: Candidate) -> list[str]:
    """Return the settings of asyncrl-train."""
    split, setting = one.split, one.setting
    limit = setting.in_play
    running = "auto" if limit is None else limit // one.siblings or "null"
    return [
        *(["cluster.placement=colocated", "weights.pause_mode=retract"] if split.colocated else []),
        f"engine.count={split.engines}",
        f"rollout.batch_groups={one.batch_groups}",
        f"rollout.group_size={one.siblings}",
        f"rollout.max_staleness={setting.max_staleness}",
        f"rollout.lead={setting.lead}",
        f"rollout.max_running_groups={running}",
        *([f"trainer.batch_parts={setting.parts}"] if setting.parts > 1 else []),
        *(["weights.overlap=true"] if setting.overlap else []),
        *split.overrides,
    ]


def report(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON."""
    return {
        "best": _row(plan.best),
        "others": [_row(one) for one in plan.others],
        "colocated": _row(plan.colocated) if plan.colocated else None,
        "synchronous_is_better": plan.synchronous,
        "one_more_gpu": {"engines": plan.more_engine, "trainer": plan.more_trainer},
        "overrides": overrides(chosen(plan)),
    }


def _named(plan: Plan) -> Iterator[tuple[str, Candidate]]:
    yield "best", plan.best
    yield from (("", one) for one in plan.others)
    if plan.colocated:
        yield "synchronous", plan.colocated


def _row(one: Candidate) -> dict[str, Any]:
    split, setting = one.split, one.setting
    runs: Sequence[Prediction | SimulationResult] = one.simulated or [one.law]
    return {
        "engines": split.engines,
        "engine_gpus": split.engine_gpus,
        "trainer_gpus": split.trainers,
        "max_staleness": setting.max_staleness,
        "lead": setting.lead,
        "running_episodes": setting.in_play or None,
        "samples_per_s": one.rate,
        "spread": one.spread,
        "simulated": bool(one.simulated),
        "law_samples_per_s": one.law.samples_per_s,
        "trainer_busy": statistics.fmean(run.trainer_busy for run in runs),
        "engines_busy": statistics.fmean(run.engines_busy for run in runs),
        "staleness_mean": one.staleness,
        "binds": one.law.binds,
        "limits": one.law.limits,
        "memory": split.memory,
    }


def _cells(name: str, row: dict[str, Any]) -> list[str]:
    memory = ", ".join(f"{size / 1e9:.0f}" for size in row["memory"].values())
    return [
        name,
        f"{row['engines']} x {row['engine_gpus']}",
        str(row["trainer_gpus"]),
        f"{row['max_staleness']}, {row['lead']}",
        f"{row['samples_per_s']:.4g}" + (f" ± {row['spread']:.1%}" if row["simulated"] else ""),
        f"{row['law_samples_per_s']:.4g}",
        f"{row['trainer_busy']:.0%}",
        f"{row['engines_busy']:.0%}",
        f"{row['staleness_mean']:.1f}",
        row["binds"],
        memory or "-",
    ]


def svg(plan: Plan) -> str:
    """Return a plot of episodes/s by GPUs of engines: a line of the laws for each bound, dots of the simulations."""
    lines: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for one in plan.laws:
        points, gpus = lines[one.setting.max_staleness], one.split.engines * one.split.engine_gpus
        points[gpus] = max(one.law.samples_per_s, points.get(gpus, 0.0))
    dots = [one for one in (plan.best, *plan.others) if one.simulated]
    right = max(gpus for points in lines.values() for gpus in points)
    top = 1.1 * max([*(rate for points in lines.values() for rate in points.values()), *(one.rate for one in dots)])

    def place(gpus: float, rate: float) -> tuple[float, float]:
        return (MARGIN + gpus / right * (WIDTH - 2 * MARGIN), HEIGHT - MARGIN - rate / top * (HEIGHT - 2 * MARGIN))

    parts = [_text(WIDTH / 2, HEIGHT - 12, "GPUs of engines"), _text(WIDTH / 2, 24, "episodes per second")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), bottom = place(share * right, share * top), HEIGHT - MARGIN
        parts.append(_text(x, bottom + 18, f"{share * right:.0f}") + _text(MARGIN - 26, y + 4, f"{share * top:.3g}"))
        parts.append(f'<path d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
    for (bound, points), colour in zip(sorted(lines.items()), COLOURS * 2, strict=False):
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in sorted(points.items()))
        x, y = place(*max(points.items(), key=lambda point: point[1]))  # the ends of the lines meet
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"/>' + _text(x, y - 6, f"bound {bound}"))
    for one in dots:
        x, y = place(one.split.engines * one.split.engine_gpus, one.rate)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11" text-anchor="middle"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{text}</text>'
