"""An environment that is at fault where its question says so: in which method, how, and how often before it is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from asyncrl.envs.env import Step

FAULTS = ("raises", "hangs", "dies", "exits", "garbage", "oversized", "prints", "no step", "cannot be sent")
"""What a hosted one can do; "prints" is no fault."""


class Faulty:
    """Counts its steps, and is done at the third; "dies" is a SIGKILL of its process."""

    def __init__(self, *, marks: str = "") -> None:
        self._marks, self._count = marks, 0
        self._fault: dict[str, Any] = {}
        self._mark("made")

    def reset(self, question: dict[str, Any]) -> Any:
        self._fault = question
        return self._act("reset")

    def step(self, action: str) -> Step:
        self._count += 1
        found = self._act("step")
        return found if found is not None else Step(f"{action}{self._count}", reward=0.5, done=self._count == 3)

    def close(self) -> None:
        self._act("close")
        self._mark("closed")

    def _mark(self, what: str) -> None:
        if self._marks:
            (Path(self._marks) / f"{what}-{uuid.uuid4()}").touch()

    def _act(self, where: str) -> Any:
        if self._fault.get("where") != where:
            return None
        if (once := self._fault.get("once")) and not _first(Path(once)):
            return None
        fault = self._fault["fault"]
        if fault == "raises":
            raise KeyError("on purpose")
        if fault == "hangs":
            time.sleep(600)
        if fault == "leaves a child":
            subprocess.Popen(["sleep", "600"])
        if fault in ("dies", "leaves a child"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exits":
            print("the last line", flush=True)
            os._exit(3)
        if fault == "garbage":
            os.write(int(sys.argv[1]), b"\x05\x00\x00\x00hello")
            time.sleep(600)
        if fault == "prints":
            for _ in range(100):
                os.write(1, b"x" * (1 << 20))
        if fault == "oversized":
            return Step("x" * (100 << 20))
        if fault == "no step":
            return "a text"
        if fault == "cannot be sent":
            return Step(info={"object": object()})
        if fault == "no messages":
            return ["a text"] if where == "reset" else Step(["a text"])  # type: ignore[list-item]
        if fault == "not finite":
            return Step(reward=float("nan"))
        return None


def _first(mark: Path) -> bool:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class AsyncFaulty(Faulty):
    """The same in the event loop, which it must not stop."""

    async def step(self, action: str) -> Step:  # type: ignore[override]
        if self._fault.get("fault") == "hangs":
            await asyncio.Event().wait()
        return super().step(action)


class NeverMade:
    """Raises where it is made."""

    def __init__(self) -> None:
        raise OSError("no display")

    def step(self, action: str) -> Step: ...


class Telling:
    """Tells of its process what the action asks for."""

    def reset(self, question: dict[str, Any]) -> None:
        """Nothing to tell."""

    def step(self, action: str) -> Step:
        found = {"pid": str(os.getpid()), "gpus": repr(os.environ.get("CUDA_VISIBLE_DEVICES"))}
        if action == "long":
            print("x" * (1 << 20) + "the end of the line", flush=True)
            os._exit(3)
        if action == "unended":
            print("no end of the line", end="", flush=True)
            os._exit(0)
        return Step(found.get(action, action), rewards={"white": 0.5, "black": float(action == "nan" and "nan")})


class Due(Telling):
    """There is more to get at the end."""

    def __init__(self, *, due: float | None) -> None:
        self._due = due

    def finish(self) -> float | None:
        return self._due


class Lingering(Telling):
    """It never ends."""

    async def close(self) -> None:
        await asyncio.Event().wait()
