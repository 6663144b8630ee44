"""Profiles of single steps (trainer.profile): a trace of torch's profiler, and on GPUs a snapshot of the memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from asyncrl.parallel import Parallel

FOLDER = "profile"
ENTRIES = 100_000
"""Number of allocations that a memory snapshot remembers."""


@contextmanager
def profiled(step: int, steps: Sequence[int], run_dir: Path, parallel: Parallel) -> Iterator[None]:
    """Write the profile of the block into the run folder, if the step is one of `steps`."""
    if step not in steps:
        yield
        return
    folder, gpu = run_dir / FOLDER, parallel.device.type == "cuda"
    folder.mkdir(exist_ok=True)
    if gpu:
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as trace:
        yield
    name = f"step-{step:06d}-rank-{parallel.rank}"
    trace.export_chrome_trace(str(folder / f"{name}.json.gz"))
    if gpu:
        torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
