"""NVML's figures are averaged between two batches, and machines without GPUs have none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.extensions.counters.gpus import Gpus
from asyncrl.metrics.fields import unknown


class Lost(Exception):
    """Stand-in for NVMLError."""


def nvml(count: int, busy: list[int]) -> SimpleNamespace:
    def utilization(handle: int) -> SimpleNamespace:
        if handle == 1:
            raise Lost
        return SimpleNamespace(gpu=busy.pop(0))

    def begin() -> None:
        if not count:
            raise Lost

    return SimpleNamespace(
        NVMLError=Lost,
        nvmlInit=begin,
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=utilization,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=10, total=80),
    )


def test_gpus_are_averaged_and_a_lost_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(2, [50, 100]))
    gpus = Gpus()
    assert gpus.sample() == [{"gpu": 0, "utilization": 0.5, "memory": 10, "capacity": 80}]
    gpus.sample()
    figures = gpus.take_figures()
    assert figures == {"gpu/0/utilization": 0.75, "gpu/0/memory": 10}
    assert unknown(figures) == []
    assert gpus.take_figures() == {}


@pytest.mark.parametrize("package", [nvml(0, []), None], ids=["no driver", "no package"])
def test_machine_without_a_driver_or_its_package_has_none(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", package)
    assert (Gpus().sample(), Gpus().take_figures()) == ([], {})
