"""What this folder adds: processes with GPUs stay on the CPUs near them."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncrl import extension

if TYPE_CHECKING:
    from pathlib import Path

    from asyncrl.config import Config
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses

BINDING = "asyncrl.extensions.numa.binding"


class NumaHooks(extension.LaunchHooks):
    """Binds processes as they start, on their own machine."""

    def changed(self, config: Config, spec: ProcessSpec, addresses: Addresses, run_dir: Path) -> ProcessSpec:
        """Return a Python process with GPUs as one that first binds itself."""
        if not spec.env.get("CUDA_VISIBLE_DEVICES") or spec.argv[0] != sys.executable:
            return spec
        return replace(spec, argv=[sys.executable, "-m", BINDING, *spec.argv[1:]])


class Numa(extension.Extension):
    """Binding of processes to the CPUs near their GPUs."""

    def launch(self) -> extension.LaunchHooks:
        """Return the hooks in the launcher."""
        return NumaHooks()


Own = Numa
