"""The order in which the prompts of a cohort are started (rollout.start_order).

In any other order than that of the draw, prompts are drawn for a whole cohort at once, and wait here until a group may
start; the next ones are drawn when all of them have started. Without rejections, a cohort has the same prompts in every
order, so that staleness and batches are those of the draw. A prompt is expected to take as many tokens as it took in an
earlier epoch, or else as recent groups of its task did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from asyncrl.schema import Group, Prompt

Order = Literal["in_order", "shortest_first", "longest_first"]


@dataclass
class OrderState:
    """State for a checkpoint."""

    waiting: list[tuple[str, str, int]] = field(default_factory=list)
    """Uid, task and index of the prompts that were drawn and are not started, in the order of the draw."""
    lengths: dict[str, dict[int, float]] = field(default_factory=dict)
    """Mean tokens of an answer to each question, by task and index, when it was played last."""


class StartOrder:
    """Chooses the prompt that is started next."""

    def __init__(self, order: Order = "in_order", cohort: int = 1) -> None:
        """`cohort` is the number of prompts that are drawn at once."""
        self._order, self._cohort = order, cohort
        self._waiting: list[Prompt] = []
        self._lengths: dict[str, dict[int, float]] = {}

    def next(self, draw: Callable[[], Prompt], mean: Callable[[str], float | None]) -> Prompt:
        """Return the next prompt. `mean` returns the mean tokens of recent answers of a task, if there are any."""
        if not self._waiting:
            if self._order == "in_order":
                return draw()
            self._waiting = [draw() for _ in range(self._cohort)]

        def rank(place: int) -> float:
            prompt = self._waiting[place]
            known = self._lengths.get(prompt.task, {}).get(prompt.index)
            tokens = known if known is not None else mean(prompt.task) or 0.0
            return {"in_order": 0.0, "shortest_first": tokens, "longest_first": -tokens}[self._order]

        return self._waiting.pop(min(range(len(self._waiting)), key=rank))

    def record(self, group: Group, index: int) -> None:
        """Record the lengths of the answers to a question that may be drawn again."""
        if self._order != "in_order":
            self._lengths.setdefault(group.task, {})[index] = fmean(group.lengths)

    def state(self) -> OrderState:
        """Return the state. Serialize it immediately: it shares its parts with this object."""
        return OrderState([(one.uid, one.task, one.index) for one in self._waiting], self._lengths)

    def restore(self, state: OrderState, again: Callable[[str, str, int], Prompt]) -> None:
        """Restore a saved state; `again` returns a prompt that was drawn before."""
        self._waiting = [again(*name) for name in state.waiting]
        self._lengths = state.lengths
