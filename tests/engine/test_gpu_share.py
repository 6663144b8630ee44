"""Hooks into SGLang's memory: an engine that is told a fraction has that part of a GPU whatever others use of it, by
SGLang's own arithmetic, and releases its memory once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from asyncrl.engine import sglang_hooks

SIZES = """
import json
from types import SimpleNamespace

import asyncrl.engine.serve
import torch
from sglang.srt import runtime_context
from sglang.srt.distributed import bootstrap
from sglang.srt.mem_cache import kv_cache_configurator as sizing

GIB, WHOLE, WEIGHTS = 1 << 30, 80, 16
alone = SimpleNamespace(launch_world_size=1, tp_size=1, gated_launch_port=None)
alone.world_group = SimpleNamespace(world_size=1, cpu_group=None)
model = SimpleNamespace(is_multimodal=False)
runner = SimpleNamespace(device="cuda", gpu_id=0, mambaish_config=None, model_config=model)
for module in (runtime_context, bootstrap, sizing):
    module.get_schedule = lambda: SimpleNamespace(mem_fraction_static=0.4)
    module.get_parallel = lambda: alone
bootstrap.get_device = lambda: runner
bootstrap.get_serving = lambda: SimpleNamespace(host="")
bootstrap.get_world_group = lambda: alone.world_group
sizing.get_mm = lambda: SimpleNamespace(mm_feature_transport=None)


def size(used):
    \"\"\"Return the GiB of weights and cache where others use some of the GPU.\"\"\"
    free = WHOLE - used
    torch.cuda.mem_get_info = lambda: (free * GIB, WHOLE * GIB)
    bootstrap.get_available_gpu_memory = lambda *_, **__: free
    sizing.get_available_gpu_memory = lambda *_, **__: free - WEIGHTS
    try:
        measured = bootstrap.measure_pre_model_load_memory(device="cuda", is_draft_worker=False)
        return WEIGHTS + sizing.KVCacheConfigurator._profile_available_bytes(runner, measured) / GIB
    except ValueError as error:
        return str(error)


print(json.dumps([size(used) for used in (0, 1, 40, 47, 49)]))
"""


def sizes(*argv: str) -> list[float | str]:
    """Return weights and cache of an engine that is told 0.4, where others use 0, 1, 40, 47 and 49 of 80 GiB."""
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # as every engine on a CPU
    program = [sys.executable, "-c", SIZES, *argv]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_weights_and_cache_are_a_fixed_part_of_a_gpu() -> None:
    """More than is free is refused with the setting. SGLang alone takes 0.4 of what is free."""
    *same, refused = sizes(sglang_hooks.MEMORY_FRACTION, "0.4")
    assert same == pytest.approx([32.0] * 4)
    assert "mem_fraction_static=0.4 (engine.memory_fraction) of this GPU's 80.0 GiB is more than the 31.0 GiB" in str(
        refused
    )
    assert "set at most 0.38" in str(refused)
    whole, less, none, *_ = sizes()
    assert (whole, less) == pytest.approx((32.0, 0.4 * 79))
    assert "no GPU memory for the KV cache" in str(none)
