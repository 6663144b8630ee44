"""What the GPUs of the rollout process's machine do."""

from __future__ import annotations

import importlib
from collections import defaultdict
from contextlib import suppress
from statistics import fmean
from typing import Any


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
