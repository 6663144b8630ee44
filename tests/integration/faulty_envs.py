"""An environment around the digits to copy that is at fault now and then: where and how is drawn by its question."""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

from asyncrl.envs.env import Step
from tests.envs.faulty import Faulty

KINDS = ("raises", "hangs", "dies", "leaves a child", "exits", "garbage", "oversized", "no step", "cannot be sent")
SHARE = 0.25
"""Of questions with a fault, until there are enough."""


class Copying(Faulty):
    """Two turns: copy the first digit, then the second."""

    def __init__(self, *, marks: str, faults: int) -> None:
        super().__init__()
        self._folder, self._most = Path(marks), faults

    def question(self, index: int) -> dict[str, Any]:
        """Two digits; of some, a fault."""
        draw = random.Random(index)
        digits = f"{draw.randrange(100):02}"
        question: dict[str, Any] = {"messages": [{"role": "user", "content": digits}], "digits": digits}
        if draw.random() < SHARE and len(list(self._folder.glob("fault-*"))) < self._most:
            question |= {"fault": draw.choice(KINDS), "where": draw.choice(["reset", "step"])}
        return question

    def reset(self, question: dict[str, Any]) -> None:
        """A fault of a question befalls about one episode in four, and its next attempts as well."""
        self._digits = question["digits"]
        if "fault" in question and random.random() < 0.75:
            question = {key: value for key, value in question.items() if key != "where"}
        super().reset(question)

    def step(self, action: str) -> Step:
        """The digit, or not."""
        found = super().step(action)
        if not isinstance(found, Step) or len(str(found.messages)) > 100 or found.info:
            return found
        right = action[:1] == self._digits[self._count - 1]
        return Step("0", reward=float(right), done=self._count == 2)

    def _act(self, where: str) -> Any:
        if self._fault.get("where") == where:
            if where == "reset" and self._fault["fault"] in ("oversized", "no step", "cannot be sent"):
                return None  # a reset returns nothing that could be wrong
            kind = self._fault["fault"].replace(" ", "_")
            (self._folder / f"fault-{kind}-{uuid.uuid4()}").touch()
        return super()._act(where)
