"""What this folder adds: the live view of a run, and the commands that show it, which the console names at its end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from rich.console import Console

    from asyncrl.config import Config


class Hooks(extension.LaunchHooks):
    """Names the commands, and draws the run on a terminal."""

    def display(self, config: Config, run_dir: Path, out: Console) -> extension.Display:
        """Return the live view."""
        from asyncrl.extensions.view.live import LiveView

        return LiveView(config, run_dir, out)

    def offers(self, config: Config, run_dir: Path) -> Iterator[tuple[str, str]]:
        """Yield the page, and what shows groups if they were recorded."""
        yield "the run as a page", shlex.join(["asyncrl-watch", str(run_dir)])
        if config.record:
            yield "groups and tokens", shlex.join(["asyncrl-inspect", str(run_dir)])


class View(extension.Extension):
    """Shows runs."""

    trains = False

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return Hooks()


Own = View
