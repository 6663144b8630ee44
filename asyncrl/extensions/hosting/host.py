"""Process that hosts environments: python -m asyncrl.extensions.hosting.host FD. The other side is hosted.py.

Messages (children/processes.py) are [number, environment, method, arguments] one way, [number, outcome, value] back.
Each environment has a thread of its own, so that one that is slow stops no other.

    waits for     the next frame; the end of the stream, or of the parent, is its end
    on a hang     the parent kills it
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import queue
import signal
import sys
import threading
import traceback
from typing import Any

from asyncrl.envs.env import EnvSpec, Step, awaited, checked_messages
from asyncrl.errors import AsyncRLError, EpisodeFailed, is_ours, raised_by
from asyncrl.extensions.children.processes import framed, messages
from asyncrl.schema import number

VALUE, FAILED = "value", "failed"
"""Outcomes: what a method returned; or reason, detail and retry of an EpisodeFailed."""
PR_SET_PDEATHSIG = 1


class HostedInstance:
    """One environment, and the thread that runs it."""

    def __init__(self, reply: Any) -> None:
        self._reply, self._calls = reply, queue.SimpleQueue[tuple[int, str, list[Any]] | None]()
        self._env: Any = None
        self._runner = asyncio.Runner()
        threading.Thread(target=self._work, daemon=True).start()

    def call(self, number: int, method: str, arguments: list[Any]) -> None:
        """Queue a call behind those before it."""
        self._calls.put((number, method, arguments))

    def end(self) -> None:
        """End the thread after the environment's last call."""
        self._calls.put(None)

    def _work(self) -> None:
        while call := self._calls.get():
            number, method, arguments = call
            try:
                with raised_by("environment_error", retry=True):
                    outcome, value = VALUE, self._run(method, arguments)
            except AsyncRLError as error:
                outcome, value = FAILED, _told(error)
            self._reply(number, outcome, value)

    def _run(self, method: str, arguments: list[Any]) -> Any:
        if method == "make":
            self._env = EnvSpec(*arguments).make()
            return None
        if method in ("close", "finish") and not hasattr(self._env, method):
            return None
        found = getattr(self._env, method)(*arguments)
        if inspect.isawaitable(found):
            found = self._runner.run(awaited(found))
        if method == "step" and not isinstance(found, Step):
            raise TypeError(f"step returned {type(found).__name__} instead of a Step")
        if isinstance(found, Step):
            return found.plain()
        if method == "finish":
            return number(found, "the reward of finish")
        return checked_messages(found, method) if method == "reset" and found else found


def _told(error: AsyncRLError) -> list[Any]:
    """Return an error's text with the traceback, which begins with the environment's own code."""
    if not isinstance(error, EpisodeFailed):
        return ["environment_error", str(error), False]
    if (cause := error.__cause__) and (frames := cause.__traceback__):
        while frames.tb_next and is_ours(frames.tb_frame.f_code.co_filename):
            frames = frames.tb_next
        cause = cause.with_traceback(frames)
    trace = "\n" + "".join(traceback.format_exception(cause)) if cause else ""
    return [error.reason, f"{error.located}{trace}", error.retry]


def main(fd: int) -> None:
    """Serve until the stream ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    residents: dict[int, HostedInstance] = {}
    writing = threading.Lock()

    def reply(number: int, outcome: str, value: Any) -> None:
        try:
            data = framed([number, outcome, value])
        except (TypeError, OverflowError) as error:
            why = ["environment_error", f"it returned a value that cannot be sent: {error}", True]
            data = framed([number, FAILED, why])
        with writing:
            _write(fd, data)

    for serial, name, method, arguments in messages(os.fdopen(fd, "rb")):
        if method == "make":
            residents[name] = HostedInstance(reply)
        residents[name].call(serial, method, arguments)
        if method == "close":
            residents.pop(name).end()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent decides the order
    main(int(sys.argv[1]))
    os._exit(0)  # do not wait for threads of environments that still run
