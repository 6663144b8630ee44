"""One GPU as Python sees it through torch.cuda, on a machine that has none.

The C stand-ins (driver.c, runtime.c) answer torch's own calls. This module answers what Python code asks, and keeps
torch.cuda from starting a context. Import it right after torch: torch._dynamo keeps what it finds then.
"""

from __future__ import annotations

import types
from typing import Any

import torch

H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    uuid="stub",
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
B200 = types.SimpleNamespace(
    **{**vars(H100), "name": "NVIDIA B200", "major": 10, "multi_processor_count": 148, "total_memory": 180 << 30}
)


class Synchronizations:
    """Number of times that the host waited for the device by name, instead of by reading a value."""

    count = 0

    @classmethod
    def note(cls, *_: Any, **__: Any) -> None:
        """Count one."""
        cls.count += 1


def install(gpu: types.SimpleNamespace = H100) -> None:
    """Make torch.cuda describe this GPU."""
    random_state = torch.zeros(16, dtype=torch.uint8)
    answers = {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda *_, **__: None,
        "is_initialized": lambda: True,
        "get_device_properties": lambda *_: gpu,
        "get_device_capability": lambda *_: (gpu.major, gpu.minor),
        "get_device_name": lambda *_: gpu.name,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (gpu.total_memory, gpu.total_memory),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "synchronize": Synchronizations.note,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": lambda *_: None,
        "get_rng_state": lambda *_, **__: random_state,
        "set_rng_state": lambda *_, **__: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.Event.synchronize = torch.cuda.Stream.synchronize = Synchronizations.note
    torch.cuda.random.get_rng_state = answers["get_rng_state"]
    torch.cuda.random.set_rng_state = answers["set_rng_state"]
