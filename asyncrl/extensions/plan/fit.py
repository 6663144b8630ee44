"""Input of a plan from a recorded run: config.json, metrics.jsonl and the timeline of its episodes.

    engines     seconds per token of each episode against the mean number of others that decoded meanwhile
    trainer     seconds of a step without waiting and pause against its tokens; the first quarter is excluded
    lengths     a log-normal distribution: mean, deviation of the logarithm, and the share that siblings have in common
    tools       the episodes' time outside of engines, over the gaps between turns

A turn is a request that was answered. A request that was cut off is part of the turn whose answer continues it, and an
attempt at an episode that failed is no part of the episode. Without timelines, metrics.jsonl gives the mean length, and
the tokens per second of busy engines against the groups in flight. The notes of a fit say what it does not know.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config import Config, RolloutConfig
from asyncrl.errors import RecordError
from asyncrl.extensions.plan import inputs, recorded
from asyncrl.extensions.plan.laws import LengthSample
from asyncrl.extensions.plan.search import in_play
from asyncrl.extensions.plan.simulation import simulate
from asyncrl.extensions.timelines import files, reader
from asyncrl.observability.intervals import DECODE, PREFILL, QUEUED, RETRY, Interval
from asyncrl.observability.timeline import EpisodeTimeline, GroupTimeline

Array = np.ndarray[Any, Any]
Steps = Sequence[dict[str, Any]]
PROMPTS = "Tokens of prompts are not recorded: set prompt and prefill_rate if prefill matters."
APART = "The speed of prefill is not known apart from that of decoding: set prefill_rate for prompts of other lengths."
UNKNOWN = (
    "Without timelines (timelines.record=true) the spread of lengths, what siblings share of it, and the time of tools "
    "are not known: sigma=0.9, alike=0.5 and tool_seconds=0 are assumed. Engines are measured as a whole, with prefill."
)
CONSTANT = "The number of groups in flight did not vary: how engines slow down with larger batches is not known."
TRAINER = (
    "How the trainer's time divides into a fixed part and a part per token is not known, because its steps do not show "
    "it: all of it is taken to be per token. Set train_rate and train_fixed if you know better."
)
SIZES = "Tasks have groups of different sizes: the mean is assumed."
SURE = 2.0
"""Standard errors by which the part per token must differ from 0."""
STEADY = 0.25
"""Fraction of a run's steps that is left out, while engines and trainer warm up."""


Comparison = dict[str, tuple[float, float]]
"""What is predicted of a run in its own setting, and what was measured, by name."""


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
    engines: int
    """Number of engines, as a mean."""

    def compare(self, seeds: int = 2) -> Comparison:
        """Simulate the run in its own setting. Return what is predicted and what was measured: samples per second,
        the trainer's busy fraction and the mean staleness."""
        rollout, trainer = self.settings.rollout, self.settings.trainer
        given = inputs.parse(self.fields | {"engines": self.engines, "trainers": trainer.world_size})
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


def in_words(compared: Comparison) -> str:
    """Return a comparison as a sentence."""
    (rate, made), busy, ages = compared.values()
    return (
        f"In its own setting the run is predicted to make {rate:.4g} samples/s and made {made:.4g} "
        f"({rate / made - 1:+.1%}); trainer busy {busy[0]:.0%}, {busy[1]:.0%}; staleness {ages[0]:.2f}, "
        f"{ages[1]:.2f}."
    )


def fit(run: Path) -> Fit:
    """Return what a run tells. Raises RecordError if it lacks what is needed, or no plan can be made from its kind."""
    settings, steps = recorded.read(run)
    refuse(run, settings)
    if len(steps) < 4:
        raise RecordError(f"{run} has {len(steps)} steps: at least 4 are needed.")
    try:
        return _fitted(run, settings, steps)
    except KeyError as missing:
        raise RecordError(f"The steps in {run / 'metrics.jsonl'} have no {missing}.") from None


def refuse(run: Path, settings: Config) -> None:
    """Raise RecordError if the times of a run do not tell what a plan needs."""
    engine, placement = settings.engine, settings.cluster.placement
    for name, value, wrong, reason in (
        ("mode", settings.mode, settings.mode != "train", "choose a run that generates and trains"),
        ("cluster.placement", placement, settings.cluster.shares_gpus, "choose a run with placement=separate"),
        ("engine.urls", engine.urls, bool(engine.urls), "choose a run that starts its own engines"),
    ):
        if wrong:
            raise RecordError(f"{run} has {name}={value}, from which no plan can be made: {reason}.")


def _fitted(run: Path, settings: Config, steps: Steps) -> Fit:
    groups = [
        record
        for _, records in reader.read(run, files.ROLLOUT)
        for record in records
        if isinstance(record, GroupTimeline) and record.purpose == "training" and record.outcome == "committed"
    ]
    engine, trainer, rollout = settings.engine, settings.trainer, settings.rollout
    steady = steps[int(len(steps) * STEADY) :]
    prompts = [step["prompt/length"] for step in steady if "prompt/length" in step]
    notes = [APART if prompts else PROMPTS]
    serving = [engines_of(step, engine.started) for step in steps]
    engines = float(np.average(serving, weights=[step["time/step"] for step in steps]))
    if not engines:
        raise RecordError(f"No engine served in {run}.")
    if max(serving) - min(serving) > 0.01:
        notes.append(
            f"Between {min(serving):.3g} and {max(serving):.3g} engines served: {engines:.3g}, the mean, are assumed."
        )
    if len(groups) >= 8:
        (per_token, per_request), lengths = engine_times(groups, engines), length_fields(groups)
        mean = float(np.mean([one.tokens for g in groups for one in g.episodes]))
        sizes = [len(group.episodes) for group in groups]
    else:
        lengths = mean_fields(steady)
        per_token, per_request, varied = fleet_times(steady, engine.started, generating(rollout, lengths))
        mean, notes = lengths["mean"], [*notes, UNKNOWN, *([] if varied else [CONSTANT])]
        sizes = [settings.group_size(name) for name in settings.mixture]
    size, number = round(statistics.fmean(sizes)), max(1, round(engines))
    rate, fixed, known = trainer_times(steady, rollout.batch_groups * size * mean)
    notes += [*([SIZES] if len(set(sizes)) > 1 else []), *([] if known else [TRAINER])]
    fields = {
        "gpus": trainer.world_size + number * engine.ranks,
        "engine_gpus": engine.ranks,
        "trainer_gpus": trainer.world_size // trainer.data_parallel,
        "batch_groups": rollout.batch_groups,
        "group_size": size,
        **({"batch_parts": trainer.batch_parts} if trainer.batch_parts > 1 else {}),
        **({"overlap": True} if settings.weights.overlap else {}),
        **({"prompt": statistics.fmean(prompts)} if prompts else {}),
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
    return Fit(run, settings, steady, fields, notes, number)


def engines_of(step: dict[str, Any], started: int) -> float:
    """Return the number of engines that served in a step."""
    return float(step.get("engines/serving", started))


def generating(rollout: RolloutConfig, lengths: dict[str, float]) -> float:
    """Return the mean number of episodes of a group in flight that are not finished, for the assumed spread."""
    size = rollout.group_size
    given = inputs.PlanInput(gpus=1, group_size=size, longest=rollout.max_new_tokens, **lengths)  # type: ignore[arg-type]
    return size * LengthSample.of(given.lengths().group, 256).kappa


def fleet_times(steps: Steps, started: int, each: float) -> tuple[float, float, bool]:
    """Return the seconds per token, and per token and request, of an engine, from the tokens per second of the fleet
    against the groups in flight, of which each has `each` unfinished episodes; and whether their number varied enough
    to tell the two apart."""
    engines = np.array([max(1.0, engines_of(step, started)) for step in steps])
    busy = np.array([max(1e-9, step["time/engine_busy"] - step["time/pause"]) for step in steps])
    tokens = np.array([step["tokens/generated"] for step in steps], float)
    running = np.maximum(1.0, np.array([step["groups/running"] for step in steps], float) * each / engines)
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


def engine_times(groups: Sequence[GroupTimeline], engines: float) -> tuple[float, float]:
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
    written = np.array([one.tokens - _begun(one) for one in episodes])  # an interval begins with its first token
    kept = (seconds > 0) & (written > 0)
    fixed, slope = _line(batch[kept], seconds[kept] / written[kept], written[kept])
    return max(fixed, 1e-9), slope


def trainer_times(steps: Steps, batch: float) -> tuple[float, float, bool]:
    """Return the tokens of episodes per second of the trainer, the fixed seconds of a step, and whether the steps show
    the two apart; otherwise nothing counts as fixed. `batch` is the tokens of a batch's episodes, of which those
    without a signal are not trained."""
    busy = np.array([_working(step) for step in steps])
    tokens = np.array([step["tokens/trained"] for step in steps], float)
    fixed, slope = _line(tokens, busy, np.ones(len(steps)))
    mean = float(tokens.mean())
    known = slope > SURE * _slope_error(tokens, busy)
    if not known:
        fixed, slope = 0.0, float(busy.mean()) / max(mean, 1e-9)
    return batch / max(slope * mean, 1e-9), fixed, known


def _slope_error(x: Array, y: Array) -> float:
    """Return the standard error of the slope of a line through (x, y)."""
    spread = float(((x - x.mean()) ** 2).sum())
    if len(x) < 3 or spread <= 1e-6 * float((x**2).sum()):
        return math.inf
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    rest = y - y.mean() - slope * (x - x.mean())
    return float(((rest**2).sum() / (len(x) - 2) / spread) ** 0.5)


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


def _last_attempt(episode: EpisodeTimeline) -> list[Interval]:
    """Return the intervals since the episode was begun for the last time. The wait before an attempt at the whole
    episode has the name of its failure; that before a continuation has the outcome of the request that it continues."""
    cuts = {one.outcome for one in episode.intervals if one.phase in (PREFILL, DECODE)}
    failed = [one.end for one in episode.intervals if one.phase == RETRY and one.name not in cuts]
    return [one for one in episode.intervals if one.start >= max(failed, default=-math.inf)]


def _turns(episode: EpisodeTimeline) -> int:
    """Return the number of requests that were answered."""
    requests = [one for one in _last_attempt(episode) if one.phase in (PREFILL, DECODE)]
    return max(1, sum((one.phase == PREFILL) - bool(one.outcome) for one in requests))


def _begun(episode: EpisodeTimeline) -> int:
    """Return the number of requests whose first token arrived."""
    return sum(one.phase == PREFILL and not one.outcome for one in episode.intervals)


def outside(episode: EpisodeTimeline) -> float:
    """Return the seconds of an episode between its first and its last request that no engine spent on it, and in which
    no request waited to be continued."""
    requests = [one for one in _last_attempt(episode) if one.phase in (QUEUED, PREFILL, DECODE, RETRY)]
    if not requests:
        return 0.0
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
