"""A warning when a user's code blocks the event loop, in which all episodes of a process run."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import asyncrl
from asyncrl.errors import is_of_user, is_ours

if TYPE_CHECKING:
    from asyncrl.rollout.reporters import Warn

LONG = 2.0
"""Seconds without a turn of the event loop after which a thread looks where it is: long enough for a warning, whatever
else a busy machine does. Shorter blocks are not found."""
EVERY = 0.5
"""Seconds between two looks. Two in a row must see the same function: the process might have been suspended at one."""
PACKAGE = f"{Path(asyncrl.__file__).parent}/"


class BlockWatch:
    """Looks from a thread at the event loop that it was created in, and warns there, once for each function that blocks
    the loop. What blocks it forever ends the run with its stack (launch/stalls.py)."""

    def __init__(self, warn: Warn) -> None:
        self._warn = warn
        self._loops_thread = threading.get_ident()
        self._turn = time.monotonic()
        self._ended = threading.Event()
        self._turns = asyncio.create_task(self._take_turns())
        threading.Thread(target=self._look, name="blocking", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._turns.cancel()

    async def _take_turns(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            self._turn = time.monotonic()

    def _look(self) -> None:
        before = None
        told = set[CodeType]()
        while not self._ended.wait(EVERY):
            still = time.monotonic() - self._turn - EVERY
            frame = _of_user(sys._current_frames().get(self._loops_thread)) if still > LONG else None
            code = frame.f_code if frame else None
            if frame and code and code is before and code not in told:
                told.add(code)
                self._warn(
                    f"the event loop has stood still for {still:.1f} s, and with it every episode of this process, at "
                    f"{code.co_filename}:{frame.f_lineno}, in {code.co_qualname}: await an asynchronous client there, "
                    "or asyncio.to_thread(function)."
                )
            before = code


def _of_user(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of a user's code in this stack; None if it is the package's code that runs. (Whoever
    awaits that code is in the stack as well.)"""
    while frame and frame.f_code is not asyncio.Handle._run.__code__:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return None
        if not is_ours(file) and is_of_user(file):
            return frame
        frame = frame.f_back
    return None
