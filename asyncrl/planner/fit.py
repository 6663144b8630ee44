"""Input of a plan from a recorded run: config.json, metrics.jsonl and the timeline of its episodes.

    engines     seconds per token of each episode against the mean number of others that decoded meanwhile
    trainer     seconds of a step without waiting and pause against its tokens; the first quarter is excluded
    lengths     a log-normal distribution: mean, deviation of the logarithm, and the share that siblings have in common
    tools       the episodes' time outside of engines, over the gaps between turns

Without timelines, metrics.jsonl gives the mean length, and the tokens per second of busy engines against the groups in
flight. The notes of a fit say what it does not know.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl import config
from asyncrl.config import Config, RolloutConfig
from asyncrl.errors import RecordError
from asyncrl.observability import timeline
from asyncrl.observability.intervals import DECODE, PREFILL, QUEUED, Interval
from asyncrl.observability.timeline import EpisodeTimeline, GroupTimeline
from asyncrl.planner import inputs
from asyncrl.planner.laws import LengthSample
from asyncrl.planner.search import in_play
from asyncrl.planner.simulation import simulate

Array = np.ndarray[Any, Any]
Steps = Sequence[dict[str, Any]]
PROMPTS = "Tokens of prompts are not recorded: set prompt and prefill_rate if prefill matters."
UNKNOWN = (
    "Without timelines (metrics.timeline=true) the spread of lengths, what siblings share of it, and the time of tools "
    "are not known: sigma=0.9, alike=0.5 and tool_seconds=0 are assumed. Engines are measured as a whole, with prefill."
)
CONSTANT = "The number of groups in flight did not vary: how engines slow down with larger batches is not known."
STEADY = 0.25
"""Fraction of a run's steps that is left out, while engines and trainer warm up."""


@dataclass(frozen=True)
class Fit:
    """What a run tells a plan."""

    run: Path
    settings: Config
    steps: Steps
    fields: dict[str, Any]
    """Fields of PlanInput."""
    notes: list[str]
    """What the run does not tell."""

    def compare(self, seeds: int = 2) -> dict[str, tuple[float, float]]:
        """Simulate the run in its own setting. Return what is predicted and what was measured: samples per second,
        the trainer's busy fraction and the mean staleness."""
        rollout, engine, trainer = self.settings.rollout, self.settings.engine, self.settings.trainer
        given = inputs.parse(self.fields | {"engines": engine.started, "trainers": trainer.world_size})
        split = next(one for one in inputs.splits(given) if not one.colocated)
        limit = in_play(rollout.max_running_groups, given.group_size)
        setting = split.setting(rollout.max_staleness, rollout.effective_lead, limit)
        warm, batch = 2 + 2 * rollout.max_staleness, given.batch_groups * given.group_size
        found = [simulate(given.workload(seed), setting, max(20, warm), warm) for seed in range(seeds)]
        seconds = sum(step["time/step"] for step in self.steps)
        mean = statistics.fmean
        return {
            "samples_per_s": (mean(batch / one.step for one in found), len(self.steps) * batch / seconds),
            "trainer_busy": (mean(one.trainer_busy for one in found), sum(map(_working, self.steps)) / seconds),
            "staleness": (
                mean(one.staleness_mean for one in found),
                mean(step["staleness/mean"] for step in self.steps),
            ),
        }

    def check(self, seeds: int = 2) -> str:
        """Return the comparison in words."""
        (rate, made), busy, ages = self.compare(seeds).values()
        return (
            f"In its own setting the run is predicted to make {rate:.4g} samples/s and made {made:.4g} "
            f"({rate / made - 1:+.1%}); trainer busy {busy[0]:.0%}, {busy[1]:.0%}; staleness {ages[0]:.2f}, "
            f"{ages[1]:.2f}."
        )


def fit(run: Path) -> Fit:
    """Return what a run tells. Raises RecordError if it lacks what is needed."""
    try:
        settings = config.read(run)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise RecordError(f"{run} is not the folder of a run: {error}") from None
    groups = [
        record
        for _, records in timeline.read(run, timeline.ROLLOUT)
        for record in records
        if isinstance(record, GroupTimeline) and record.purpose == "training" and record.outcome == "committed"
    ]
    if len(steps) < 4:
        raise RecordError(f"{run} has {len(steps)} steps: at least 4 are needed.")
    engine, trainer, rollout = settings.engine, settings.trainer, settings.rollout
    steady, notes = steps[int(len(steps) * STEADY) :], [PROMPTS]
    if len(groups) >= 8:
        (per_token, per_request), lengths = engine_times(groups, engine.started), length_fields(groups)
        mean = float(np.mean([one.tokens for g in groups for one in g.episodes]))
    else:
        lengths = mean_fields(steady)
        per_token, per_request, varied = fleet_times(steady, engine.started, generating(rollout, lengths))
        mean, notes = lengths["mean"], [*notes, UNKNOWN, *([] if varied else [CONSTANT])]
    rate, fixed = trainer_times(steady, rollout.batch_groups * rollout.group_size * mean)
    fields = {
        "gpus": trainer.world_size + engine.started * engine.ranks,
        "engine_gpus": engine.ranks,
        "trainer_gpus": trainer.world_size // trainer.data_parallel,
        "batch_groups": rollout.batch_groups,
        "group_size": rollout.group_size,
        **({"batch_parts": trainer.batch_parts} if trainer.batch_parts > 1 else {}),
        **({"overlap": True} if settings.weights.overlap else {}),
        "longest": rollout.max_new_tokens,
        "per_token": per_token,
        "per_request": per_request,
        "max_running": engine.max_running_requests,
        **({"kv_tokens": engine.max_total_tokens} if engine.max_total_tokens else {}),
        "train_rate": rate / trainer.world_size,
        "train_fixed": fixed,
        "pause": float(np.mean([step["time/pause"] for step in steady])),
        **lengths,
    }
    return Fit(run, settings, steady, fields, notes)


def generating(rollout: RolloutConfig, lengths: dict[str, float]) -> float:
    """Return the mean number of episodes of a group in flight that are not finished, for the assumed spread."""
    size = rollout.group_size
    given = inputs.PlanInput(gpus=1, group_size=size, longest=rollout.max_new_tokens, **lengths)  # type: ignore[arg-type]
    return size * LengthSample.of(given.lengths().group, 256).kappa


def fleet_times(steps: Steps, engines: int, each: float) -> tuple[float, float, bool]:
    """Return the seconds per token, and per token and request, of an engine, from the tokens per second of the fleet
    against the groups in flight, of which each has `each` unfinished episodes; and whether their number varied enough
    to tell the two apart."""
    busy = np.array([max(1e-9, step["time/engine_busy"] - step["time/pause"]) for step in steps])
    tokens = np.array([step["tokens/generated"] for step in steps], float)
    running = np.array([max(1.0, step["groups/running"] * each / engines) for step in steps])
    fixed, slope = _line(running, running * engines * busy / np.maximum(tokens, 1.0), tokens)
    return max(fixed, 1e-9), slope, bool(running.std() > 0.1 * running.mean())


def mean_fields(steps: Steps) -> dict[str, float]:
    """Return the fields of PlanInput about lengths that the metrics of steps have."""
    turns = float(np.mean([step["episodes/turns"] for step in steps]))
    return {
        "mean": float(np.mean([step["completion/length"] * step["episodes/turns"] for step in steps])),
        "turns": turns,
    }


def _working(step: dict[str, Any]) -> float:
    """Return the seconds of a step in which the trainer neither waits for a batch nor for paused engines."""
    paused = 0.0 if "time/publish_background" in step else step["time/pause"]
    return float(step["time/step"] - step["time/wait_batch"] - paused)


def engine_times(groups: Sequence[GroupTimeline], engines: int) -> tuple[float, float]:
    """Return the seconds per token, and per token and request, of an engine."""
    episodes = [one for group in groups for one in group.episodes if one.tokens > 1]
    spans = [[one for one in episode.intervals if one.phase == DECODE] for episode in episodes]
    starts, ends = (np.sort([getattr(one, end) for span in spans for one in span]) for end in ("start", "end"))
    times = np.unique(np.concatenate([starts, ends]))
    running = np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")
    total = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])  # request seconds up to each time

    def together(of: Sequence[Interval]) -> float:
        return float(sum(np.diff(np.interp([one.start, one.end], times, total))[0] for one in of))

    seconds = np.array([sum(one.seconds for one in span) for span in spans])
    batch = np.array([together(span) for span in spans]) / np.maximum(seconds, 1e-9) / engines
    written = np.array([one.tokens - _turns(one) for one in episodes])  # an interval begins with its first token
    kept = (seconds > 0) & (written > 0)
    fixed, slope = _line(batch[kept], seconds[kept] / written[kept], written[kept])
    return max(fixed, 1e-9), slope


def trainer_times(steps: Steps, batch: float) -> tuple[float, float]:
    """Return the tokens of episodes per second of the trainer, and the fixed seconds of a step. `batch` is the tokens
    of a batch's episodes, of which those without a signal are not trained."""
    busy = np.array([_working(step) for step in steps])
    tokens = np.array([step["tokens/trained"] for step in steps], float)
    fixed, slope = _line(tokens, busy, np.ones(len(steps)))
    trained = float(tokens.mean())
    return batch / max(slope * trained, 1e-9), fixed


def length_fields(groups: Sequence[GroupTimeline]) -> dict[str, float]:
    """Return the fields of PlanInput about lengths, turns and tools."""
    logs = [np.log([max(1, one.tokens) for one in group.episodes]) for group in groups]
    every = np.concatenate(logs)
    within = float(np.mean([part.var(ddof=1) for part in logs if len(part) > 1] or [0.0]))
    variance = max(float(every.var()), 1e-12)
    episodes = [one for group in groups for one in group.episodes]
    gaps = sum(_turns(one) - 1 for one in episodes)
    seconds = sum(outside(one) for one in episodes if _turns(one) > 1)
    return {
        "mean": float(np.mean(np.exp(every))),
        "sigma": variance**0.5,
        "alike": min(1.0, max(0.0, 1 - within / variance)),
        "turns": float(np.mean([_turns(one) for one in episodes])),
        "tool_seconds": seconds / gaps if gaps else 0.0,
    }


def _turns(episode: EpisodeTimeline) -> int:
    return max(1, sum(one.phase == PREFILL for one in episode.intervals))


def outside(episode: EpisodeTimeline) -> float:
    """Return the seconds of an episode between its first and its last request that no engine spent on it."""
    requests = [one for one in episode.intervals if one.phase in (QUEUED, PREFILL, DECODE)]
    span = max(one.end for one in requests) - min(one.start for one in requests)
    return max(0.0, span - sum(one.seconds for one in requests))


def _line(x: Array, y: Array, weight: Array) -> tuple[float, float]:
    """Return intercept and slope of a line through (x, y), neither negative."""
    slope = 0.0
    centre, level = np.average(x, weights=weight), np.average(y, weights=weight)
    if (spread := float(np.average((x - centre) ** 2, weights=weight))) > 1e-6 * centre**2:
        slope = float(np.average((x - centre) * (y - level), weights=weight)) / spread
    slope = min(max(slope, 0.0), float(level / centre)) if centre > 0 else 0.0
    return float(level - slope * centre), slope
