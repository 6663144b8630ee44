"""Registry of the engines that join and leave a running run: the folder leases/ of the run, on a shared file system.

    run.lease          the launcher's lease: the run is under way
    HOST-PORT.lease    lease of an engine that somebody else started for this run (asyncrl-engines add)
    HOST-PORT.leave    the engine, whoever started it, is asked to leave
    HOST-PORT.left     the engine has left: the trainer sends it no weights, and the router no requests

An engine may be stopped only after it has left: one that ends in the middle of a broadcast holds up the others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.leases import SUFFIX, Lease, Leases

FOLDER = "leases"
RUN = "run"
LEAVE, LEFT = ".leave", ".left"


class Registry:
    """The registry of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._leases = Leases(self._folder)

    def clear(self) -> None:
        """Delete the files of an earlier start of the run, whose engines hold another API key."""
        self._folder.mkdir(exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)

    # -- engines of the run --------------------------------------------------------------------------------

    def lease_of_run(self, **facts: Any) -> Lease:
        """Return the launcher's own lease."""
        return Lease(self.file_of_run, facts)

    @property
    def file_of_run(self) -> Path:
        """Path of the launcher's lease."""
        return self._folder / f"{RUN}{SUFFIX}"

    def lease_of(self, url: str, **facts: Any) -> Lease:
        """Return the lease of an engine."""
        return Lease(self.file_of(url), {"url": url, **facts})

    def file_of(self, url: str) -> Path:
        """Return the path of an engine's lease."""
        return self._folder / f"{_name(url)}{SUFFIX}"

    def run(self) -> dict[str, Any] | None:
        """Return the facts in the launcher's lease, or None when the run has ended."""
        return self._leases.look().get(RUN)

    def joined(self) -> dict[str, dict[str, Any]]:
        """Return the facts in the leases of engines that others started, by URL."""
        return {facts["url"]: facts for name, facts in self._leases.look().items() if name != RUN}

    # -- engines that leave --------------------------------------------------------------------------------

    def ask_to_leave(self, url: str) -> None:
        """Ask an engine to leave. Whoever started it then stops it."""
        (self._folder / f"{_name(url)}{LEAVE}").write_text(url)

    def leaving(self) -> set[str]:
        """Return the URLs of the engines that are asked to leave."""
        urls = set()
        for name in self._names(LEAVE):
            try:
                urls.add((self._folder / name).read_text())
            except OSError:  # the file was deleted in the meantime
                continue
        return urls - {""}

    def let_go(self, url: str) -> None:
        """Record that an engine has left. The trainer calls this."""
        (self._folder / f"{_name(url)}{LEFT}").touch()

    def has_left(self, url: str) -> bool:
        """Return whether the trainer has recorded that an engine has left."""
        return f"{_name(url)}{LEFT}" in self._names(LEFT)

    def stopped(self, url: str) -> None:
        """Withdraw the request to leave, now that the engine has stopped."""
        (self._folder / f"{_name(url)}{LEAVE}").unlink(missing_ok=True)

    def starts(self, url: str) -> None:
        """Delete the requests to leave that were meant for an earlier engine at this address."""
        for suffix in (LEAVE, LEFT):
            (self._folder / f"{_name(url)}{suffix}").unlink(missing_ok=True)

    def _names(self, suffix: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._folder) if name.endswith(suffix)]
        except OSError:
            return []


def _name(url: str) -> str:
    address = urlsplit(url)
    return f"{address.hostname}-{address.port}".replace(":", "_")
