"""Exceptions that asyncrl raises on purpose.

AsyncRLError
|-- ConfigError        a setting is wrong; states the field, the value received and the remedy
|-- CompositionError   Hydra cannot compose the settings; states the nearest field
|-- DeadlineExceeded   a wait timed out; states what was waited for and who should have provided it
|-- ProcessDied        a process of the run ended; states its name, its exit status and its last lines
|-- LaunchError        a cluster, or the machines of a job, do not behave as required
|-- EngineError        an engine or the router refused a call, or gave an invalid answer
|   `-- PeerFailed     another process of the run has failed; its own error says why
|-- WeightsError       a tensor is missing, left over, of a wrong shape, or unknown to its family's table; names it
|-- EpisodeFailed      an episode failed through no fault of the policy: it is counted and replaced, never scored 0
|-- LedgerError        a prompt, group, trajectory or token is lost or counted twice; states equation and difference
|-- RecordError        a recording or a checkpoint is damaged, or lacks what was requested
`-- BadStep            a training step that must not be applied (not finite, or exploding), under the `stop` policy

PromptRefused is a ValueError, because the code that made the prompt is at fault: it becomes EpisodeFailed there.

Stopped and Paused also end a run but are not errors: a signal reached the launcher, or the run will be resumed later.

Any other exception that escapes is a bug and ends the run with its traceback.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb


class AsyncRLError(Exception):
    """Base class of all errors that a user can cause or fix."""


class ConfigError(AsyncRLError, ValueError):
    """Raised when a setting is wrong. It states the field, the value received and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}: got {value!r}. {remedy}")


class CompositionError(AsyncRLError):
    """Raised when Hydra rejects the command line or a file of conf/."""


class DeadlineExceeded(AsyncRLError):
    """Raised when a wait reaches its deadline."""

    def __init__(self, what: str, seconds: float, hint: str = "") -> None:
        super().__init__(f"waited {seconds:.0f} s for {what}" + (f": {hint}" if hint else ""))


class ProcessDied(AsyncRLError):
    """Raised when a process of a run ends prematurely. Only the first such process is reported."""


class LaunchError(AsyncRLError):
    """Raised when a cluster refuses the job, or machines of the job do not respond."""


class EngineError(AsyncRLError):
    """Raised when an engine or the router refuses a call or gives an invalid answer."""


class PeerFailed(EngineError):
    """Raised when another process of the run has failed. The error of that process says why."""


class WeightsError(AsyncRLError):
    """Raised when weights do not match the model, its table of names, or their checksum. It names the tensor."""


class EpisodeFailed(AsyncRLError):
    """Raised when an episode produces no trajectory through no fault of the policy.

    `reason` is the name under which the ledger counts it. `retry` states whether another attempt may succeed. The
    default is False for errors of the agent or the reward function, which would be repeated, and True otherwise.
    `where` is the line of user code that raised the error; `detail` is without it, because a model may be told that.
    """

    def __init__(self, reason: str, detail: str = "", *, retry: bool | None = None, where: str = "") -> None:
        self.reason, self.detail, self.where = reason, detail, where
        self.retry = reason not in ("agent_error", "reward_error") if retry is None else retry
        super().__init__(f"{reason}: {self.located}" if detail else reason)

    @property
    def located(self) -> str:
        """Return the detail with the line of user code."""
        return f"{self.detail} ({self.where})" if self.where else self.detail


class PromptRefused(ValueError):
    """Raised for a prompt that an engine would die of. It states why and what helps."""


class LedgerError(AsyncRLError):
    """Raised when the two sides of a ledger equation differ, so that batches can no longer be trusted."""


class BadStep(AsyncRLError):
    """Raised when a gradient must not be applied."""


class RecordError(AsyncRLError):
    """Raised when a recording or a checkpoint is damaged, has another format, or lacks what was requested."""


class Stopped(Exception):
    """Raised when SIGINT, SIGTERM or SIGHUP reaches the launcher."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.advice = ""
        """How the run can go on, for the user."""
        super().__init__(signal.Signals(number).name)


class Paused(Exception):
    """Raised when the run was paused on request, or something outside of it failed. It can be resumed (resume=auto)."""


@contextmanager
def raised_by(reason: str, *, retry: bool = False) -> Iterator[None]:
    """Turn exceptions of user code in this context into an EpisodeFailed with this reason.

    This includes SystemExit, KeyboardInterrupt, and a CancelledError of something that the user's code waited for. An
    AsyncRLError passes unchanged, because it is typed already.
    """
    try:
        yield
    except AsyncRLError:
        raise
    except BaseException as error:
        if _is_the_loops(error):
            raise
        detail = f"{type(error).__name__}: {error}"
        raise EpisodeFailed(reason, detail, retry=retry, where=place(error)) from error


def _is_the_loops(error: BaseException) -> bool:
    """Return whether the event loop ends the task with this error. In a thread without a loop, user code raised it."""
    import asyncio  # at this place, because the launcher's --help does not need it

    if not isinstance(error, GeneratorExit | asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return isinstance(error, GeneratorExit) or task is None or task.cancelling() > 0


def described(error: BaseException) -> str:
    """Return an exception of user code in one line: its type, its text, and the line of code that raised it."""
    where = place(error)
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")


_OURS, _PYTHONS = f"{Path(__file__).parent}/", f"{Path(os.__file__).parent}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")


def place(error: BaseException) -> str:
    """Return the file, line and function of the user's code that raised an error, or else of an installed package's.
    Empty if only asyncrl and Python were involved."""
    found: BaseException | None = error
    while found:
        if isinstance(found, SyntaxError) and found.filename:
            return f"{found.filename}:{found.lineno}"
        frames = [(frame.f_code, line) for frame, line in walk_tb(found.__traceback__)]
        others = [(code, line) for code, line in frames if not is_ours(code.co_filename)]
        users = [one for one in others if not any(part in one[0].co_filename for part in _PACKAGES)]
        if others:
            code, line = (users or others)[-1]
            return f"{code.co_filename}:{line}, in {code.co_qualname}"
        found = found.__cause__ or found.__context__
    return ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory could not be allocated, on a GPU or not. The types are those of torch, which the launcher
    does not import."""
    text = str(error).lower()
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in text or "can't allocate memory" in text


def is_of_user(place: str) -> bool:
    """Return whether a place that `place` returned is in the user's code, and not in an installed package."""
    return bool(place) and not any(part in place for part in _PACKAGES)


def is_ours(file: str) -> bool:
    """Return whether a file belongs to asyncrl or to Python itself."""
    installed = any(part in file for part in _PACKAGES)
    return file.startswith((_OURS, "<")) or (file.startswith(_PYTHONS) and not installed)


def first_of(error: BaseException) -> BaseException:
    """Return the exception that a group of exceptions began with; the exception itself if it is none."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline (ESC starts terminal commands), and characters that change the text's
direction."""


def visible(text: str) -> str:
    """Return the text with its control characters as Python escapes."""
    return _STEERING.sub(lambda found: repr(found[0])[1:-1], text)
