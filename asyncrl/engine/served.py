"""What answers a request. Without an extension these are the weights that all engines hold, at whatever version they
are; one may let engines hold several versions or models at once, of which each request names one
(Extension.served)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from asyncrl.engine.session import GenerationSession, Request


class InUse(msgspec.Struct, frozen=True):
    """The answer to the announcement of a version: what engines that hold several must keep besides it."""

    versions: list[int] = []
    """Versions in use, of all models."""
    past: dict[str, list[int]] = {}
    """Further versions of single models, by name."""


class ServedWeights:
    """Chooses what answers a request, and counts who uses which version. Not thread-safe: one event loop owns it."""

    pins = False
    """Whether an answer has one version from its first to its last token."""
    shared = True
    """Whether siblings may share a request."""

    def trains(self, role: str) -> bool:
        """Return whether the turns of a role are trained."""
        return True

    def assign(self, request: Request, newest: int) -> None:
        """Set what answers a request: its `model`, `pinned`, `holds` and `fields`. Raises ConfigError for a role that
        nothing plays."""

    def acquire(self, version: int | None) -> None:
        """Count a new user of a version; no-op for None."""

    def release(self, version: int | None) -> None:
        """Count a user that has ended; no-op for None."""

    def held(self, version: int) -> AbstractContextManager[int | None]:
        """Return a block in which this version stays loaded. It yields the version; None if engines hold one at a
        time."""
        return nullcontext()

    def closed(self, session: GenerationSession) -> None:
        """End the use of the version that a session kept."""

    def in_use(self, newest: int) -> InUse:
        """Return what engines must keep while `newest` is the newest version."""
        return InUse()
