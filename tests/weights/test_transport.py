"""The choice of the transport, and properties of transports that need no engine."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

from asyncrl.errors import ConfigError
from asyncrl.weights.choice import choose
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
