"""A hook into SGLang 0.5.21: an engine releases its memory once, however often it is asked to."""

from __future__ import annotations

from typing import Any

from asyncrl.import_hooks import after_import


def install() -> None:
    """Patch SGLang's class when it is imported."""
    after_import("sglang.srt.managers.scheduler_components.weight_updater", release_once)


def release_once(module: Any) -> None:
    """Patch SchedulerWeightUpdaterManager: memory that is released already is left alone.

    SGLang would copy buffers that have no memory, and end. Trainers that start again do not know what those that died
    had released (hand_over.py).
    """
    manager = module.SchedulerWeightUpdaterManager
    release = manager.release_memory_occupation

    def release_memory_occupation(self: Any, request: Any) -> Any:
        request.tags = [tag for tag in request.tags or module.GPU_MEMORY_ALL_TYPES if tag not in self.offload_tags]
        return release(self, request) if request.tags else module.ReleaseMemoryOccupationReqOutput()

    manager.release_memory_occupation = release_memory_occupation
