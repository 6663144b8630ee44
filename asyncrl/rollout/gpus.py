"""Utilization and memory of the GPUs of the rollout process's machine, as NVML reports them."""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean
from typing import Any


class Gpus:
    """The GPUs of this machine; none without NVIDIA's driver."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(one) for one in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            self._handles = []
        self._seen: dict[str, list[float]] = defaultdict(list)

    def sample(self) -> list[dict[str, Any]]:
        """Return what each GPU does now; one that does not answer is left out."""
        found = []
        for index, handle in enumerate(self._handles):
            try:
                busy = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
            except self._nvml.NVMLError:
                continue
            self._seen[f"gpu/{index}/utilization"].append(busy)
            self._seen[f"gpu/{index}/memory"].append(memory.used)
            found.append({"gpu": index, "utilization": busy, "memory": memory.used, "capacity": memory.total})
        return found

    def take_figures(self) -> dict[str, float]:
        """Return the means of the samples since the last call, under their names in metrics.jsonl."""
        seen, self._seen = self._seen, defaultdict(list)
        return {name: fmean(values) for name, values in seen.items()}
