"""Engines that come and go while a run is under way: the folder leases/ of the run, on a file system that all see.

    run.lease          the launcher's: the run is under way
    HOST-PORT.lease    of an engine that somebody else started for this run (asyncrl-engines add)
    HOST-PORT.leave    an engine, whoever started it, is asked to leave
    HOST-PORT.left     it has: the trainer sends it no weights, the router no requests

An engine may be stopped only then: one that ends in the middle of a broadcast over NCCL takes the trainer along.
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
    """That of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._leases = Leases(self._folder)

    def clear(self) -> None:
        """Forget whoever was there in an earlier life of the run: what they hold is another key."""
        self._folder.mkdir(exist_ok=True)
        for file in self._folder.iterdir():
            file.unlink(missing_ok=True)

    # -- who is there --------------------------------------------------------------------------------------

    def lease_of_run(self, **facts: Any) -> Lease:
        """The launcher's own."""
        return Lease(self.file_of_run, facts)

    @property
    def file_of_run(self) -> Path:
        """Where it is."""
        return self._folder / f"{RUN}{SUFFIX}"

    def lease_of(self, url: str, **facts: Any) -> Lease:
        """Of an engine."""
        return Lease(self.file_of(url), {"url": url, **facts})

    def file_of(self, url: str) -> Path:
        """Where it is."""
        return self._folder / f"{_name(url)}{SUFFIX}"

    def run(self) -> dict[str, Any] | None:
        """What the launcher tells of the run; None when it has ended."""
        return self._leases.look().get(RUN)

    def joined(self) -> dict[str, dict[str, Any]]:
        """What is told of engines that others started, by URL."""
        return {told["url"]: told for name, told in self._leases.look().items() if name != RUN}

    # -- who leaves ----------------------------------------------------------------------------------------

    def ask_to_leave(self, url: str) -> None:
        """Whoever started it will stop it."""
        (self._folder / f"{_name(url)}{LEAVE}").write_text(url)

    def leaving(self) -> set[str]:
        """URLs of engines that are asked to."""
        found = set()
        for name in self._names(LEAVE):
            try:
                found.add((self._folder / name).read_text())
            except OSError:  # it has gone meanwhile
                continue
        return found - {""}

    def let_go(self, url: str) -> None:
        """The trainer's word."""
        (self._folder / f"{_name(url)}{LEFT}").touch()

    def has_left(self, url: str) -> bool:
        """Whether the trainer has said so."""
        return f"{_name(url)}{LEFT}" in self._names(LEFT)

    def stopped(self, url: str) -> None:
        """It was asked to leave, and runs no more."""
        (self._folder / f"{_name(url)}{LEAVE}").unlink(missing_ok=True)

    def starts(self, url: str) -> None:
        """What was asked of another at this address is not meant for it."""
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
