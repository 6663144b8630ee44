"""A plan as a table, as JSON, as a plot, and as overrides of asyncrl-train."""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from asyncrl.extensions.plan.inputs import SWITCH, PlanInput
from asyncrl.extensions.plan.laws import Prediction
from asyncrl.extensions.plan.model_splits import HARDWARE, ROOM
from asyncrl.extensions.plan.search import CHANGES, NEAR, Candidate, Plan
from asyncrl.extensions.plan.simulation import SimulationResult

WIDTH, HEIGHT, MARGIN = 720, 400, 60
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1", "#9c755f")
COLUMNS = (
    "",
    "engines",
    "trainer GPUs",
    "bound, lead",
    "samples/s",
    "laws",
    "trainer busy",
    "engines busy",
    "staleness",
    "binds",
    "GB per GPU: trainer, engine",
)
REMEDY = {
    "engines": "more engines",
    "concurrency": "a larger bound or batch",
    "order": "more slack (bound minus lead), a larger bound, or shorter longest episodes",
}
SPEEDS = ("per_token", "per_request", "max_running", "kv_tokens", "prefill_rate")
UNHARMED = 2
"""Largest bound up to which the study of staleness found no loss (docs/algorithms.md, "How it learns")."""
CUT = 0.1
"""Fraction of episodes that are cut off above which this is said."""
OFF = 0.2
"""Error in a recorded run's own setting above which its plan is not to be trusted."""


def show(plan: Plan, given: PlanInput, notes: Sequence[str] = (), own_error: float | None = None) -> None:
    """Print the table, the findings, notes about the input, and the overrides. `own_error` is how far off a recorded
    run is predicted in its own setting, as a fraction."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
    table = Table(*COLUMNS)
    for name, one in _named(plan):
        table.add_row(*cells(name, one))
    console.print(table)
    for line in (*findings(plan, given), *uncertainty(plan, own_error), *assumed(plan, given), *notes):
        console.print(line, markup=False)
    console.print(" ".join(overrides(chosen(plan))), markup=False)


def findings(plan: Plan, given: PlanInput) -> Iterator[str]:
    """Yield what binds, what one more GPU gives, which GPUs are not needed, and whether synchronous is better."""
    best = plan.best
    yield f"The {best.law.binds} law binds: what helps is {_remedy(best)}."
    yield (
        f"By the laws, one more GPU adds {plan.more_engine:+.2g} samples/s to engines, {plan.more_trainer:+.2g} to the "
        "trainer."
    )
    if best.setting.max_staleness > UNHARMED:
        yield (
            f"The bound of {best.setting.max_staleness} is chosen for speed alone. In this project's study nothing was "
            f"lost up to {UNHARMED}, and learning was about five batches behind at 8 (docs/algorithms.md)."
        )
    split, (engines, trainers) = best.split, plan.enough
    used, enough = split.engines * split.engine_gpus + split.trainers, engines * split.engine_gpus + trainers
    if enough <= 0.9 * used:
        yield (
            f"By the laws, {enough} GPUs give {1 - NEAR:.0%} of this: {engines} x {split.engine_gpus} for engines and "
            f"{trainers} for the trainer."
        )
    if used < given.gpus:
        yield f"{given.gpus - used} of {given.gpus} GPUs are not used."
    if plan.colocated is None:
        yield "Engines and trainer on the same GPUs in turns do not fit: there is no synchronous run to compare with."
        return
    ratio = best.rate / plan.colocated.rate
    if max(ratio, 1 / ratio) <= 1 + plan.doubt:
        better = f"which is within the uncertainty of {plan.doubt:.0%}: they are about equal"
    else:
        better = "so asynchronous is better" if ratio > 1 else "so synchronous is better"
    what = "the overrides are those of the synchronous run, which is on-policy" if plan.synchronous else ""
    yield (
        f"The best plan is {ratio:.2f} x as fast as the synchronous run that uses all GPUs in turns, {better}"
        f"{'; ' if what else ''}{what}."
    )


def _remedy(best: Candidate) -> str:
    """Return what raises the throughput where a law binds."""
    setting, law = best.setting, best.law
    if law.binds != "trainer":
        return REMEDY[law.binds]
    parts = {
        "more trainer GPUs": best.batch * law.tokens_per_s / law.samples_per_s / setting.train_rate,
        "a shorter fixed part of training, or a larger batch": setting.train_fixed,
        "a shorter publish, or a larger batch": 0.0 if setting.overlap else setting.pause,
    }
    return max(parts, key=parts.__getitem__)


def uncertainty(plan: Plan, own_error: float | None) -> Iterator[str]:
    """Yield how far the prediction may be off."""
    best = plan.best
    if own_error is not None:
        yield f"Uncertainty: the run itself is predicted with an error of {own_error:+.0%}." + (
            " That is too much for a plan: do not rely on it." if abs(own_error) > OFF else ""
        )
    if best.simulated:
        seeds = f"Simulations with other seeds differ by {best.spread:.1%}. " if len(best.simulated) > 1 else ""
        yield f"{seeds}The laws are {best.law_error:+.1%} off the simulation."
    else:
        yield "Nothing was simulated: the laws alone are usually within 5 %, but can be far off (results/plans.md)."
    rates = [one.rate for one in plan.changed]
    yield (
        f"By the laws, the plan makes {min(rates):.3g} to {max(rates):.3g} samples/s if the length of answers, the "
        f"speed of engines or that of the trainer is {' or '.join(map(str, CHANGES))} times what is assumed."
    )
    for one in plan.changed:
        if one.better:
            split = one.better
            yield (
                f"With {one.factor} times the {one.name}, {split.engines} x {split.engine_gpus} engines and "
                f"{split.trainers} trainer GPUs would be better ({one.better_rate:.3g} samples/s, not {one.rate:.3g})."
            )


def assumed(plan: Plan, given: PlanInput) -> Iterator[str]:
    """Yield what the plan takes for granted, and what its input does not say."""
    if given.model:
        hardware = HARDWARE[given.gpu]
        yield (
            f"Assumed: {given.gpu} reaches {hardware.mfu:.0%} of its operations when training "
            f"({hardware.sparse_mfu:.0%} with routed experts) and {hardware.share:.0%} of its bandwidths; {ROOM:.0%} "
            "of its memory is used; lengths do not change over the run."
        )
    else:
        yield _memory_in_words(plan)
        if given.kv_tokens is None:
            yield "The engines' cache is taken to hold every request: set kv_tokens if it limits them."
        copy = "one GPU holds" if given.trainer_gpus in (None, 1) else f"{given.trainer_gpus} GPUs hold"
        yield f"Assumed: {copy} a copy of the trainer's weights (trainer_gpus=)."
    if plan.colocated and given.switch is None:
        yield f"Assumed: the synchronous run changes over in {SWITCH:.0f} s a step (switch=)."
    tokens = [min(one.tokens, given.longest) for number in range(256) for one in given.lengths().group(number)]
    if (cut := sum(one >= given.longest for one in tokens) / len(tokens)) > CUT:
        yield (
            f"{cut:.0%} of the episodes are cut off at longest={given.longest}: they have "
            f"{statistics.fmean(tokens):.0f} tokens on average, not mean={given.mean:g}."
        )


def _memory_in_words(plan: Plan) -> str:
    """Return where the memory of a plan from typed numbers or a recorded run comes from."""
    splits = [one.split for one in (plan.best, *plan.others)]
    measured = any(split.measured for split in splits)
    computed = any(split.memory.keys() - split.measured for split in splits)
    if not measured and not computed:
        return "Memory per GPU is not known: name model= to compute it."
    said = [
        *(["measured is the peak of the run (memory/peak), whose trainer had as many GPUs"] if measured else []),
        *(
            [
                "the rest is computed from the shapes of the run's model"
                if measured
                else "computed from the shapes of the run's model"
            ]
            if computed
            else []
        ),
    ]
    return f"Memory per GPU: {'; '.join(said)}."


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


def report(plan: Plan, given: PlanInput) -> dict[str, Any]:
    """Return the plan as JSON, with its input."""
    return {
        "input": msgspec.to_builtins(given) | {"switch": given.turn_change},
        "best": _row(plan.best),
        "others": [_row(one) for one in plan.others],
        "colocated": _row(plan.colocated) if plan.colocated else None,
        "synchronous_is_better": plan.synchronous,
        "one_more_gpu": {"engines": plan.more_engine, "trainer": plan.more_trainer},
        "enough": dict(zip(("engines", "trainer_gpus"), plan.enough, strict=True)),
        "changed_inputs": [
            {
                "name": one.name,
                "factor": one.factor,
                "samples_per_s": one.rate,
                "better": one.better and {"engines": one.better.engines, "trainer_gpus": one.better.trainers},
                "better_samples_per_s": one.better_rate,
            }
            for one in plan.changed
        ],
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
        "spread": one.spread if len(one.simulated) > 1 else None,
        "simulated": bool(one.simulated),
        "law_samples_per_s": one.law.samples_per_s,
        "trainer_busy": statistics.fmean(run.trainer_busy for run in runs),
        "engines_busy": statistics.fmean(run.engines_busy for run in runs),
        "staleness_mean": one.staleness,
        "binds": one.law.binds,
        "limits": {name: _finite(limit) for name, limit in one.law.limits.items()},
        "speeds": {
            **{name: _finite(getattr(setting.shape, name)) for name in SPEEDS},
            **{name: getattr(setting, name) for name in ("train_rate", "train_fixed", "pause")},
        },
        "memory": split.memory,
        "memory_measured": list(split.measured),
    }


def _finite(value: float) -> float | None:
    """Return a number; None if it has no limit, which JSON cannot say."""
    return value if math.isfinite(value) else None


def cells(name: str, one: Candidate) -> list[str]:
    """Return a row of the table."""
    row = _row(one)
    memory = ", ".join(_memory(one, part) for part in ("trainer", "engine")) if row["memory"] else "-"
    return [
        name,
        f"{row['engines']} x {row['engine_gpus']}",
        str(row["trainer_gpus"]),
        f"{row['max_staleness']}, {row['lead']}",
        f"{row['samples_per_s']:.4g}" + (f" ± {row['spread']:.1%}" if row["spread"] is not None else ""),
        f"{row['law_samples_per_s']:.4g}",
        f"{row['trainer_busy']:.0%}",
        f"{row['engines_busy']:.0%}",
        f"{row['staleness_mean']:.1f}",
        row["binds"],
        memory,
    ]


def _memory(one: Candidate, part: str) -> str:
    """Return the GB of a GPU, and whether they were measured; "-" if they are not known."""
    if (size := one.split.memory.get(part)) is None:
        return "-"
    measured = " measured" if part in one.split.measured else ""
    return (f"{size / 1e9:.0f}" if size >= 1e10 else f"{size / 1e9:.2g}") + measured


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
