"""Profiles of single training steps, on each trainer rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.extension import TrainerHooks
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch

FOLDER = "profile"
ENTRIES = 100_000
"""Number of allocations that a memory snapshot remembers."""


class Profiles(TrainerHooks):
    """Writes the profiles of some steps. Of a batch that comes in parts, it is the last part's."""

    def __init__(self, steps: Sequence[int], parallel: Parallel) -> None:
        self._steps = steps
        self._parallel = parallel

    @contextmanager
    def around_update(self, batch: Batch, run_dir: Path) -> Iterator[None]:
        """Write the profile of the block into the run folder, if its step is to be profiled: a trace of torch's
        profiler, and on GPUs a snapshot of the memory."""
        step = batch.version + 1
        if not batch.last or step not in self._steps:
            yield
            return
        folder, gpu = run_dir / FOLDER, self._parallel.device.type == "cuda"
        folder.mkdir(exist_ok=True)
        if gpu:
            torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as trace:
            yield
        name = f"step-{step:06d}-rank-{self._parallel.rank}"
        trace.export_chrome_trace(str(folder / f"{name}.json.gz"))
        if gpu:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
