"""The plainest synchronous driver, to compare the asynchronous machinery with: draw the prompts of a batch, ask for
their answers, score them, let the caller train one step, and only then go on to the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from asyncrl.schema import Completion, Group, Prompt, Trajectory, Turn
from asyncrl.tasks import Task

Ask = Callable[[list[int], int], list[Completion]]
"""All answers to a prompt's token ids, in the version that is served."""


def batches(
    ask: Ask, prompts: Iterator[Prompt], task: Task, decode: Callable[[list[int]], str], batch_groups: int
) -> Iterator[list[Group]]:
    """Batch `version` after batch; each is asked for when the caller, who trains the one before, comes back."""
    for version in itertools.count():
        batch = []
        for slot in range(version * batch_groups, (version + 1) * batch_groups):
            prompt = next(prompts)
            trajectories = [
                Trajectory([Turn([], answer)], task.score(decode(answer.token_ids), prompt.question))
                for answer in ask(prompt.token_ids, version)
            ]
            batch.append(Group(f"g{slot:08d}a0000", slot, prompt.token_ids, trajectories, prompt.task))
        yield batch
