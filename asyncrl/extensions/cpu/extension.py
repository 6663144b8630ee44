"""What this folder adds: the platform of machines without GPUs."""

from __future__ import annotations

from asyncrl import extension


class Cpu(extension.Extension):
    """The platform of machines without GPUs."""

    platform = "asyncrl.extensions.cpu.cpu_platform:CpuPlatform"


Own = Cpu
