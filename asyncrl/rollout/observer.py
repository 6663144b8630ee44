"""The rollout process's part in observability: its timeline, what extensions make of it, and the GPUs of its
machine."""

from __future__ import annotations

import importlib
from collections import ChainMap, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from time import time
from typing import Any

from asyncrl.extension import RolloutHooks
from asyncrl.observability.timeline import ROLLOUT, Started, TimelineWriter, sampled
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.rollout.timelines import Timelines


class Gpus:
    """Utilization and memory of this machine's GPUs, as NVML reports them; none without NVIDIA's driver, or without the
    package, which the CPU locks lack."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._seen: dict[str, list[float]] = defaultdict(list)
        try:
            self._nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(one) for one in range(count)]

    def sample(self) -> list[dict[str, Any]]:
        """Return what each GPU does now; one that does not answer is left out."""
        samples = []
        for index, handle in enumerate(self._handles):
            try:
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError:
                continue
            self._seen[f"gpu/{index}/utilization"].append(busy)
            self._seen[f"gpu/{index}/memory"].append(memory.used)
            samples.append({"gpu": index, "utilization": busy, "memory": memory.used, "capacity": memory.total})
        return samples

    def take_figures(self) -> dict[str, float]:
        """Return the means of the samples since the last call, under their names in metrics.jsonl."""
        seen, self._seen = self._seen, defaultdict(list)
        return {name: fmean(values) for name, values in seen.items()}


class Observer:
    """Everything that is observed in the rollout process."""

    def __init__(self, run: RolloutRun, hooks: Sequence[RolloutHooks] = ()) -> None:
        self._hooks = hooks
        self.gpus = Gpus()
        metrics = run.config.metrics
        self._timeline = TimelineWriter(run.run_dir, ROLLOUT, run.warn, enabled=metrics.timeline)
        self._timeline(Started(run.addresses.run_id, time()))
        listeners = [one.record for one in hooks]
        self.timelines = Timelines([sampled(self._timeline, metrics.timeline_share)], listeners)
        self._reported = self._measured = 0.0

    def take_figures(self) -> dict[str, float]:
        """Return the figures since the last call, under their names in metrics.jsonl."""
        total = self.timelines.seconds + self._timeline.seconds
        metrics = self.timelines.metrics_seconds
        seconds = {"time/timeline": total - self._reported, "time/metrics": metrics - self._measured}
        self._reported = total
        self._measured = metrics
        return {**seconds, **self.gpus.take_figures(), **ChainMap(*(one.figures() for one in self._hooks))}

    def ready(self, since: float, phase: str) -> None:
        """Record that rollouts begin after this phase: the start of the run, or the recovery of this process."""
        self._timeline.phase(phase, -1, since, time())

    async def close(self) -> None:
        """Write what is left."""
        self._timeline.close()
