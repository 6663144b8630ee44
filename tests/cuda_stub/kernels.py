"""Compile the trainer's FlexAttention, forward and backward, with Inductor, Triton and ptxas, without a GPU.

`compile_packs` runs in a process of its own. A launch of a kernel does nothing, so tensors have no values.
"""

from __future__ import annotations

import random
import types
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests.cuda_stub import device

GPUS = {"sm_90": device.H100, "sm_100": device.B200}


def _driver(gpu: types.SimpleNamespace) -> Any:
    """Return what Triton asks of a driver and of the device that it compiles for."""
    import triton.backends.nvidia.driver as nvidia
    from triton.backends.compiler import GPUTarget

    properties = {
        "max_shared_mem": gpu.shared_memory_per_block_optin,
        "multiprocessor_count": gpu.multi_processor_count,
        "warpSize": gpu.warp_size,
        "max_num_regs": gpu.regs_per_multiprocessor,
        "sm_clock_rate": 1755000,
        "mem_clock_rate": 2619000,
        "mem_bus_width": 5120,
    }

    class Driver:
        utils = types.SimpleNamespace(get_device_properties=lambda _: properties)
        is_active = staticmethod(lambda: True)
        map_python_to_cpp_type = staticmethod(nvidia.ty_to_cpp)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_device_interface = staticmethod(lambda: torch.cuda)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda", 0))

    return Driver


def _target(gpu: types.SimpleNamespace) -> list[str]:
    """Make Inductor and Triton compile for this GPU. Returns a list that gets the architecture of each kernel made."""
    import triton
    import triton.backends
    import triton.backends.nvidia.driver as nvidia
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.runtime import benchmarking
    from triton.runtime import driver

    torch.set_num_threads(1)
    device.install(gpu)
    config.compile_threads, config.force_disable_caches = 1, True
    made: list[str] = []
    compile_kernel, target = triton.compile, _driver(gpu)

    def counted(*args: Any, **kwargs: Any) -> Any:
        kernel = compile_kernel(*args, **kwargs)
        assert len(kernel.asm["cubin"]) > 0
        made.append(f"sm_{kernel.metadata.target.arch}")
        return kernel

    triton.compile = counted
    driver.set_active(target())
    nvidia.CudaDriver = target
    object.__setattr__(triton.backends.backends["nvidia"], "driver", target)
    FakeTensorMode.avoid_device_init = property(lambda _: True)  # type: ignore[assignment, method-assign]
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    of_cuda = device_interface.CudaInterface
    of_cuda.Worker.get_device_properties = staticmethod(lambda *_: gpu)  # type: ignore[method-assign]
    of_cuda.get_compute_capability = staticmethod(lambda *_: 10 * gpu.major + gpu.minor)  # type: ignore[method-assign]
    benchmarking.benchmarker.benchmark = benchmarking.benchmarker.benchmark_gpu = lambda *_, **__: 1.0
    return made


def two_answers(rows: int) -> Any:
    """Return a pack of about this many rows: a prompt of a quarter, and two answers to it."""
    from asyncrl.algo.pack import pack
    from asyncrl.algo.samples import Sample

    draw = random.Random(rows)
    prompt = [draw.randrange(100) for _ in range(rows // 4)]
    length = (rows - len(prompt)) // 2 + 1
    answers = [[number, *(draw.randrange(100) for _ in range(length - 1))] for number in range(2)]
    return pack([[Sample(prompt, ids, [True] * length, 0, 0) for ids in answers]]).to(torch.device("cuda", 0))


def compile_packs(
    gpu: str,
    heads: tuple[int, int, int, int],
    lengths: tuple[int, ...],
    *,
    windows: tuple[int | None, ...] = (None,),
    sinks: bool = False,
    offload: bool = False,
) -> list[dict[str, Any]]:
    """Run forward and backward for packs of these lengths, in a layer of each of the windows. `heads` are the numbers
    of query and key heads, and the widths of a key and a value. With `offload`, what forward saves goes to host memory
    and comes back. Returns what was made for each pack, how many tensors were moved, and the number of graphs so
    far."""
    made = _target(GPUS[gpu])
    from torch._dynamo.utils import counters

    from asyncrl.extensions.offload.activation_offload import ActivationOffload
    from asyncrl.trainer import tree_attention

    moves, sent = ActivationOffload(list), []
    moves.least, send = 0, moves._send
    moves._send = lambda layer: (sent.append(len(layer.device)), send(layer))  # type: ignore[method-assign, func-returns-value]

    queries, keys, width, values = heads
    shapes = [(queries, width), (keys, width), (keys, values)]
    told = []
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        for rows in lengths:
            made.clear()
            pack = two_answers(rows)
            for window in windows:
                q, k, v, scores = (
                    torch.empty(shape, dtype=torch.bfloat16, device="cuda:0", requires_grad=True)
                    for shape in (*((pack.num_tokens, *s) for s in shapes), (queries,))
                )
                with moves.micro_batch(None, None, True) if offload else nullcontext():
                    out = tree_attention._flex(q, k, v, pack, width**-0.5, window, scores if sinks else None)
                out.backward(torch.empty_like(out))
                assert out.shape == (pack.num_tokens, queries, values)
                trained = (q, k, v, scores) if sinks else (q, k, v)
                assert all(x.grad is not None and x.grad.shape == x.shape for x in trained)
            graphs = counters["stats"]["unique_graphs"]
            told.append({"rows": pack.num_tokens, "kernels": list(made), "graphs": graphs, "moved": sum(sent)})
    return told


def compile_expert_bias(gpu: str, lengths: tuple[int, ...]) -> list[str]:
    """Run the one function of Megatron that our models use and that it compiles itself: the count of tokens by which a
    router without an auxiliary loss balances its experts. Returns the architecture of each kernel."""
    made = _target(GPUS[gpu])
    from megatron.core.transformer.moe.router import TopKRouter

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        router = types.SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(8, device="cuda:0"))
        for rows in lengths:
            TopKRouter._apply_expert_bias(router, torch.zeros(rows, 8, dtype=torch.bool, device="cuda:0"))
    return made
