"""The choice of the transport, and properties of transports that need no engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from asyncrl.engine.fleet import Fleet
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.extensions.lora.publish import AdapterFolder
from asyncrl.network.addresses import Access
from asyncrl.weights.bucket import plan_buckets
from asyncrl.weights.choice import choose
from asyncrl.weights.disk import KEPT, DiskTransport
from asyncrl.weights.transport import SharedBuffers

HERE, THERE = "http://127.0.0.1:20000", "http://10.0.0.7:20000"


@pytest.mark.parametrize(
    ("setting", "engines", "gpu", "chosen", "reason"),
    [
        ("auto", [HERE], False, "tensor", "on this host"),
        ("auto", ["http://10.0.0.1:20000"], False, "tensor", "on this host"),  # cluster.host itself
        ("auto", [HERE, THERE], False, "distributed", "10.0.0.7"),
        ("auto", [HERE], True, "distributed", "separate GPUs"),
        ("tensor", [HERE], True, "tensor", "as configured"),
        ("disk", [HERE, THERE], False, "disk", "as configured"),
    ],
)
def test_auto_takes_what_reaches_the_engines_and_says_why(setting, engines, gpu, chosen, reason) -> None:
    found, why = choose(setting, engines, "10.0.0.1", gpu=gpu)
    assert found == chosen
    assert reason in why


def test_shared_memory_to_another_host_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"weights.transport: got 'tensor'. The engines are on the hosts \['10.0.0.7'\]"
    ):
        choose("tensor", [THERE], "10.0.0.1", gpu=False)


class Loaded(Fleet):
    """Engines that load every folder; notes which were whole when they did."""

    def __init__(self) -> None:
        super().__init__([HERE], Access(""), 1.0)
        self.folders: list[list[str]] = []

    def call(self, path: str, body: dict | None = None) -> dict:
        assert body is not None
        self.folders.append(sorted(file.name for file in Path(body["model_path"]).iterdir()))
        return {}


def test_a_version_appears_when_it_is_whole_and_old_ones_go(tmp_path: Path) -> None:
    fleet = Loaded()
    transport = DiskTransport(fleet, tmp_path / "weights", stage=0)
    (bucket,) = plan_buckets([("a", torch.float32, torch.Size([2]))], 100)
    for version in range(1, 5):
        transport.start(version)
        transport.send(torch.zeros(8, dtype=torch.uint8), bucket)
        transport.send(torch.zeros(8, dtype=torch.uint8), bucket)
        assert not (tmp_path / "weights" / f"v{version:06d}").exists()
        assert transport.deliver(version)
    assert fleet.folders == [["model-stage0-00001.safetensors", "model-stage0-00002.safetensors"]] * 4
    assert sorted(folder.name for folder in (tmp_path / "weights").iterdir()) == ["v000003", "v000004"][-KEPT:]


def test_gpu_buffer_is_shared_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of torch's reduce_tensor leaves a record that lives as long as the buffer."""
    calls: list[int] = []

    def reduce_tensor(tensor: torch.Tensor) -> tuple:
        calls.append(tensor.data_ptr())
        shape = (tensor.size(), tensor.stride(), tensor.storage_offset())
        return len, (torch.Tensor, *shape, "storage class", tensor.dtype, 0, b"handle", 64, 0, False)

    monkeypatch.setattr(reductions, "reduce_tensor", reduce_tensor)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="the-gpu"))
    shared, buffers = SharedBuffers(), [torch.empty(64, dtype=torch.uint8) for _ in range(2)]
    for size in (64, 16, 32):  # versions
        for _ in range(4):  # engines and their ranks
            for buffer in buffers:
                rebuild, arguments = shared.reduce(buffer[:size])
                assert rebuild is len
                assert (arguments[1], arguments[2], arguments[3]) == ((size,), (1,), 0)
                assert arguments[6] == "the-gpu"
    assert calls == [buffer.data_ptr() for buffer in buffers]
    another = torch.empty(64, dtype=torch.uint8)
    shared.reduce(another)
    assert calls[2:] == [another.data_ptr()]


def test_replaced_arguments_are_where_torch_reads_them() -> None:
    rebuilt = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert [rebuilt[place] for place in (1, 2, 3, 6)] == [
        *("tensor_size", "tensor_stride", "tensor_offset", "storage_device")
    ]


def test_what_a_dead_trainer_left_half_written_is_not_delivered(tmp_path: Path) -> None:
    fleet = Loaded()
    (bucket,) = plan_buckets([("a", torch.float32, torch.Size([2]))], 100)
    for _ in range(2):  # the first dies before it delivers
        transport = DiskTransport(fleet, tmp_path, stage=0)
        transport.start(7)
        transport.send(torch.zeros(8, dtype=torch.uint8), bucket)
    transport.deliver(7)
    assert fleet.folders == [["model-stage0-00001.safetensors"]]


@pytest.mark.parametrize(
    "write",
    [lambda root: DiskTransport(Loaded(), root, stage=0).start(1), lambda root: AdapterFolder("v1", root, {}, {})],
)
def test_no_version_is_written_through_a_link_of_somebody_else(write: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match=r"set another weights\.folder"):
        write(tmp_path / "link")
    assert list((tmp_path / "elsewhere").iterdir()) == []
