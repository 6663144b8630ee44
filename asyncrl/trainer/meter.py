"""Measures a step of training on the ranks: time by purpose, floating-point operations, memory."""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.parallel import Parallel
from asyncrl.schema import Batch

PURPOSES = ("forward", "backward", "communication", "optimizer")
PEAK = {"B200": 2.25e15, "B100": 1.75e15, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12}
PEAK |= {"H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12}
"""Peak rate of dense bfloat16 products by a part of the GPU's name, from the vendor's data sheets. The first that is
found counts."""


def peak_rate(gpu: str) -> float | None:
    """Return the peak rate of a GPU by its name, if it is known."""
    return next((rate for part, rate in PEAK.items() if part in gpu), None)


class StepMeter:
    """Measures the steps of a rank. Megatron calls it as the timers of its configurations. On GPUs it records events
    and does not wait for the device."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._gpu = parallel.device.type == "cuda"
        self._ended = True
        self.begin()

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """Return the timer of one of Megatron's names."""
        return _Timer(self, _purpose(name))

    def measure(self, update: Callable[[Batch], dict[str, float]], batch: Batch) -> dict[str, float]:
        """Train a batch, or a part of one, and wait for the device, so that the time until the next part does not
        count. Returns the statistics and metrics of the step with its last part."""
        if self._ended:
            self.begin()
        began = time.monotonic()
        figures = update(batch)
        if self._gpu:
            torch.cuda.synchronize()
        self._spent += time.monotonic() - began
        self._ended = batch.last
        return {**figures, **self.figures(figures["tokens/packed"], self._spent)} if batch.last else {}

    def begin(self) -> None:
        """Start a step."""
        self._open: list[tuple[str, Any]] = []
        self._closed: list[tuple[str, int, Any, Any]] = []
        self._operations: list[Tensor | float] = []
        self._wall = time.time()
        self._zero = self._now()
        self._spent = 0.0
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def span(self, purpose: str) -> Iterator[None]:
        """Count the time of the block, without that of the spans within it."""
        self.enter(purpose)
        try:
            yield
        finally:
            self.leave()

    def enter(self, purpose: str) -> None:
        """Begin a span."""
        self._open.append((purpose, self._now()))

    def leave(self) -> None:
        """End the span that began last."""
        purpose, began = self._open.pop()
        ended = self._now()
        self._closed.append((purpose, 1, began, ended))
        if self._open:
            self._closed.append((self._open[-1][0], -1, began, ended))

    def count(self, operations: Tensor | float) -> None:
        """Add the floating-point operations of a pass of the whole replica, known on one of its ranks."""
        self._operations.append(operations)

    def figures(self, tokens: float, seconds: float) -> dict[str, float]:
        """Return the metrics of the step, in which `tokens` were packed within so many seconds. Collective."""
        world = dist.get_world_size()
        times: defaultdict[str, float] = defaultdict(float)
        for purpose, sign, began, ended in self._closed:
            times[purpose] += sign * self._seconds(began, ended)
        operations = sum(map(float, self._operations)) if self._parallel.counts else 0.0
        device = self._parallel.device
        sums = torch.tensor([operations, *(times[one] for one in PURPOSES)], dtype=torch.float64, device=device)
        memory = torch.tensor(self._memory(), dtype=torch.float64, device=device)
        if world > 1:
            dist.all_reduce(sums)
            dist.all_reduce(memory, dist.ReduceOp.MAX)
        operations, *spent = sums.tolist()
        rate, peak = operations / seconds / world, peak_rate(torch.cuda.get_device_name()) if self._gpu else None
        return {
            **{f"time/{purpose}": total / world for purpose, total in zip(PURPOSES, spent, strict=True)},
            "memory/peak": float(memory),
            "tokens_per_s/rank": tokens / seconds / world,
            "flops/rank": rate,
            **({"flops/utilization": rate / peak} if peak else {}),
        }

    def spans(self) -> Iterator[tuple[str, float, float]]:
        """Yield the spans of the step whose figures were returned last: purpose, start and end (time.time)."""
        for purpose, sign, began, ended in self._closed:
            if sign > 0:
                start = self._wall + self._seconds(self._zero, began)
                yield purpose, start, start + self._seconds(began, ended)

    def _seconds(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended) / 1e3 if self._gpu else ended - began)

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _memory(self) -> int:
        """Return the bytes that this rank had at most: of its GPU in this step, or of its process so far."""
        if self._gpu:
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class _Timer:
    """One of Megatron's timers."""

    def __init__(self, meter: StepMeter, purpose: str | None) -> None:
        self._meter = meter
        self._purpose = purpose

    def start(self, barrier: bool = False) -> None:
        """Begin a span, unless the name has no purpose of its own."""
        if self._purpose:
            self._meter.enter(self._purpose)

    def stop(self, barrier: bool = False) -> None:
        """End it."""
        if self._purpose:
            self._meter.leave()


def _purpose(name: str) -> str | None:
    """Return what a timer of Megatron's measures; None for those that contain others or are part of the optimizer."""
    if name in ("forward-compute", "backward-compute"):
        return name.removesuffix("-compute")
    exchanged = name.endswith(("-recv", "-send", "-sync", "-all-reduce", "-all-gather"))
    return "communication" if exchanged else None
