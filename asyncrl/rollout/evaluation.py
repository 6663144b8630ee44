"""Held-out accuracy: greedy answers of the same engines to questions that training never draws."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from asyncrl.rollout.worker import Worker
from asyncrl.tasks import Task
from asyncrl.types import Prompt


async def evaluate(worker: Worker, task: Task, held_out: list[Prompt]) -> dict[str, Any]:
    """One line of eval.jsonl; `version_min` and `version_max` differ when weights changed while it ran."""
    started = time.monotonic()
    async with asyncio.TaskGroup() as episodes:
        tasks = [episodes.create_task(worker.evaluate(prompt)) for prompt in held_out]
    trajectories = [task_.result() for task_ in tasks]
    versions = [
        span.version for trajectory in trajectories for turn in trajectory.turns for span in turn.completion.versions
    ]
    rewards = [trajectory.reward for trajectory in trajectories]
    return {
        "version_min": min(versions),
        "version_max": max(versions),
        "questions": len(held_out),
        "accuracy": sum(task.correct(reward) for reward in rewards) / len(rewards),
        "reward/mean": sum(rewards) / len(rewards),
        "tokens/mean": sum(trajectory.num_tokens for trajectory in trajectories) / len(trajectories),
        "time/eval": time.monotonic() - started,
    }
