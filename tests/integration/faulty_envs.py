"""Environment of copied digits that fails now and then; its question determines where and how. Some steps run a program
in a sandbox that attacks it, as a model's program might; the episode continues."""

from __future__ import annotations

import os
import random
import sys
import uuid
from pathlib import Path
from typing import Any

from asyncrl.envs.env import Step
from asyncrl.extensions.tools.shared import LOCAL, sandboxes
from tests.envs.faulty import Faulty
from tests.extensions.sandbox import attacks

KINDS = ("raises", "hangs", "dies", "leaves a child", "exits", "garbage", "oversized", "no step", "cannot be sent")
ATTACKS = ("fork bomb", "network", "files", "eater", "flood")
LIMITS = {**vars(attacks.LIMITS), "seconds": 2.0}
PYTHON = os.path.realpath(sys.prefix)
SHARE = 0.25
"""Fraction of questions with a fault, until there are enough faults."""


class Copying(Faulty):
    """Environment with two turns: copy the first digit, then the second."""

    def __init__(self, *, marks: str, faults: int, share: float = SHARE, public: str = "", port: int = 0) -> None:
        """Configure the attacks.

        `public` is a folder of the host for attacks on files, and `port` that of a server there for attacks on the
        network; without them there are no attacks.
        """
        super().__init__()
        self._folder, self._most, self._share, self._public, self._port = Path(marks), faults, share, public, port

    def question(self, index: int) -> dict[str, Any]:
        """Return a question of two digits; some have a fault."""
        draw = random.Random(index)
        digits = f"{draw.randrange(100):02}"
        question: dict[str, Any] = {"messages": [{"role": "user", "content": digits}], "digits": digits}
        if draw.random() < self._share and len(list(self._folder.glob("fault-*"))) < self._most:
            kinds = KINDS + (ATTACKS if self._public else ())
            question |= {"fault": draw.choice(kinds), "where": draw.choice(["reset", "step"])}
        return question

    def reset(self, question: dict[str, Any]) -> None:
        """Start the episode.

        A question's fault in `reset` or `step` occurs in about one episode in four, and in its retries too.
        """
        self._digits = question["digits"]
        if "fault" in question and random.random() < 0.75:
            question = {key: value for key, value in question.items() if key != "where"}
        super().reset(question)

    async def step(self, action: str) -> Step:  # type: ignore[override]
        """Compare the answer with the digit, or fail."""
        found = super().step(action)
        if self._fault.get("fault") in ATTACKS and "where" in self._fault and self._count == 1:
            await self._attack(self._fault["fault"])
        if not isinstance(found, Step) or len(str(found.messages)) > 100 or found.info:
            return found
        right = action[:1] == self._digits[self._count - 1]
        return Step("0", reward=float(right), done=self._count == 2)

    def _act(self, where: str) -> Any:
        if self._fault.get("where") == where:
            if where == "reset" and self._fault["fault"] in ("oversized", "no step", "cannot be sent"):
                return None  # a reset returns nothing that could be wrong
            if self._fault["fault"] not in ATTACKS:
                self._note("fault")
        return super()._act(where)

    async def _attack(self, name: str) -> None:
        attack = {
            "fork bomb": attacks.FORK_BOMB,
            "network": attacks.network(("127.0.0.1", self._port)),
            "files": attacks.files(f"{self._public}/secret", self._public, PYTHON),
            "eater": attacks.EATER,
            "flood": attacks.FLOODS[0],
        }[name]
        self._note("fault")
        sandbox = await sandboxes(LOCAL, {"limits": LIMITS}).open()
        try:
            await attack.on(sandbox)
            self._note("held")
        except AssertionError as error:
            self._note("escaped", str(error))
            raise
        finally:
            await sandbox.close()

    def _note(self, what: str, text: str = "") -> None:
        kind = self._fault["fault"].replace(" ", "_")
        (self._folder / f"{what}-{kind}-{uuid.uuid4()}").write_text(text)
