"""What this folder adds: checks of how a machine is protected from code of the model, and the removal of leftovers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.prepare import Preparation


class SandboxHooks(extension.LaunchHooks):
    """Sandboxes in the launcher. They are imported only where a run has some."""

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Report how this machine is protected from code of the model."""
        from asyncrl.extensions.sandbox.isolation import findings

        return findings(prepared)

    def notes(self, prepared: Preparation) -> list[str]:
        """Warn of what runs without isolation, if the preflight has not done so."""
        from asyncrl.extensions.sandbox.isolation import warnings

        return [] if prepared.config.cluster.preflight else warnings(prepared)

    def sweep(self) -> None:
        """Remove control groups and folders of sandboxes whose owner is dead."""
        from asyncrl.extensions.sandbox import cgroups

        cgroups.sweep(cgroups.bases())


class Sandboxes(extension.Extension):
    """Sandboxes for code of the model."""

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return SandboxHooks()


Own = Sandboxes
