"""Input of a plan from a recorded run: config.json, metrics.jsonl and the timeline of its episodes.

    engines     seconds per token of each episode against the mean number of others that decoded meanwhile
    trainer     seconds of a step without waiting and pause against its tokens; the first quarter is excluded
    lengths     a log-normal distribution: mean, deviation of the logarithm, and the share that siblings have in common
    tools       the episodes' time outside of engines, over the gaps between turns

The timeline does not tell the tokens of prompts: set `prompt` and `prefill_rate` if prefill matters.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl import config
from asyncrl.errors import RecordError
from asyncrl.observability import timeline
from asyncrl.observability.intervals import DECODE, PREFILL, QUEUED, Interval
from asyncrl.observability.timeline import EpisodeTimeline, GroupTimeline

Array = np.ndarray[Any, Any]


def fit(run: Path) -> dict[str, Any]:
    """Return fields of PlanInput. Raises RecordError if the run lacks what is needed."""
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
    if len(groups) < 8 or len(steps) < 4:
        raise RecordError(
            f"{run} has {len(steps)} steps and timelines of {len(groups)} groups: at least 4 and 8 are "
            "needed (metrics.timeline=true)."
        )
    engine, trainer, rollout = settings.engine, settings.trainer, settings.rollout
    gpus = trainer.world_size + engine.started * engine.ranks
    per_token, per_request = engine_times(groups, engine.started)
    lengths = length_fields(groups)
    steady = steps[len(steps) // 4 :]
    batch = (
        rollout.batch_groups * rollout.group_size * float(np.mean([one.tokens for g in groups for one in g.episodes]))
    )
    rate, fixed = trainer_times(steady, batch)
    return {
        "gpus": gpus,
        "engine_gpus": engine.ranks,
        "trainer_gpus": trainer.world_size // trainer.data_parallel,
        "batch_groups": rollout.batch_groups,
        "group_size": rollout.group_size,
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


def trainer_times(steps: Sequence[dict[str, Any]], batch: float) -> tuple[float, float]:
    """Return the tokens of episodes per second of the trainer, and the fixed seconds of a step. `batch` is the tokens
    of a batch's episodes, of which those without a signal are not trained."""
    busy = np.array([step["time/step"] - step["time/wait_batch"] - step["time/pause"] for step in steps])
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
    outside = sum(_outside(one) for one in episodes if _turns(one) > 1)
    return {
        "mean": float(np.mean(np.exp(every))),
        "sigma": variance**0.5,
        "alike": min(1.0, max(0.0, 1 - within / variance)),
        "turns": float(np.mean([_turns(one) for one in episodes])),
        "tool_seconds": outside / gaps if gaps else 0.0,
    }


def _turns(episode: EpisodeTimeline) -> int:
    return max(1, sum(one.phase == PREFILL for one in episode.intervals))


def _outside(episode: EpisodeTimeline) -> float:
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
