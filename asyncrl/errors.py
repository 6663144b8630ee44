"""Exceptions that asyncrl raises on purpose.

AsyncRLError
|-- ConfigError        a setting is wrong: names the field, the value received and the remedy
|-- CompositionError   Hydra cannot compose the settings: names the nearest field
|-- DeadlineExceeded   a wait timed out: names what was waited for and who should have provided it
|-- ProcessDied        a process of the run ended: names it, its exit status and its last lines
|-- LaunchError        Slurm, or the machines of a job, do not behave as required
|-- EngineError        an engine or the router refused a call, or answered something impossible
|   `-- PeerFailed     another process of the run has failed: its own error says why
|-- WeightsError       a tensor is missing, left over, of a wrong shape, or unknown to its family's table: names it
|-- EpisodeFailed      an environment's or a judge's fault: the episode is counted and replaced, never scored 0
|-- LedgerError        a prompt, group, trajectory or token is lost or counted twice: names equation and difference
|-- RecordError        a recording or a checkpoint is damaged, or lacks what was requested
`-- BadStep            a training step that must not be applied (not finite, or exploding), under the `stop` policy

Stopped and Paused also end a run but are not errors: a signal reached the launcher, or the run will be resumed later.

Any other exception that escapes is a bug and ends the run with its traceback.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class AsyncRLError(Exception):
    """Base class of all errors that a user can cause or fix."""


class ConfigError(AsyncRLError, ValueError):
    """One wrong setting: its field, the value received, and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}: got {value!r}. {remedy}")


class CompositionError(AsyncRLError):
    """Hydra refuses the command line or a file of conf/."""


class DeadlineExceeded(AsyncRLError):
    """A wait that reached its deadline."""

    def __init__(self, what: str, seconds: float, hint: str = "") -> None:
        super().__init__(f"waited {seconds:.0f} s for {what}" + (f": {hint}" if hint else ""))


class ProcessDied(AsyncRLError):
    """The first process of a run that ended prematurely."""


class LaunchError(AsyncRLError):
    """Slurm refuses the job, or machines of a job do not respond."""


class EngineError(AsyncRLError):
    """An engine or the router refused a call, or gave an invalid answer."""


class PeerFailed(EngineError):
    """Another process of the run has failed: its own error says why."""


class WeightsError(AsyncRLError):
    """Weights that do not match the model, its table of names, or their checksum; names the tensor."""


class EpisodeFailed(AsyncRLError):
    """An episode that produced no trajectory through no fault of the policy; `reason` is its ledger entry. `retry` says
    that another attempt may succeed. By default that is true of failures outside the program, and false of errors of
    the agent or the reward function, which would be repeated."""

    def __init__(self, reason: str, detail: str = "", *, retry: bool | None = None) -> None:
        self.reason, self.detail = reason, detail
        self.retry = reason not in ("agent_error", "reward_error") if retry is None else retry
        super().__init__(f"{reason}: {detail}" if detail else reason)


class LedgerError(AsyncRLError):
    """The two sides of a ledger equation differ: batches can no longer be trusted."""


class BadStep(AsyncRLError):
    """A gradient that must not be applied."""


class RecordError(AsyncRLError):
    """A recording or a checkpoint that is damaged, of another format, or lacks what was requested."""


class Stopped(Exception):
    """SIGINT or SIGTERM reached the launcher."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class Paused(Exception):
    """The run can be resumed with resume=auto: it was paused on request, or something outside of it failed."""


@contextmanager
def raised_by(reason: str, *, retry: bool = False) -> Iterator[None]:
    """Turn any exception of the user code in this context, including SystemExit, into an EpisodeFailed with this
    reason. An AsyncRLError passes unchanged, because it is typed already."""
    try:
        yield
    except AsyncRLError:
        raise
    except (Exception, SystemExit) as error:
        raise EpisodeFailed(reason, f"{type(error).__name__}: {error}", retry=retry) from error


_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and newline (ESC starts terminal commands), and characters that change the text
direction.
"""


def visible(text: str) -> str:
    """Return the text with its control characters as Python escapes."""
    return _STEERING.sub(lambda found: repr(found[0])[1:-1], text)
