"""Hook into SGLang's sizing of the KV cache, for engines that are told a fraction of a GPU (engine.memory_fraction).

SGLang 0.5.21 multiplies mem_fraction_static by the memory that is free when the engine starts, and gives weights and KV
cache that much (mem_cache/kv_cache_configurator.py). An engine that is restarted beside a trainer on its GPU finds
little free, and would have a smaller cache, or none. With the hook it gets the fraction of the whole memory each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.importing import after_import

ARGUMENT = "--mem-fraction-static"
GIB = 1 << 30


def install(argv: Sequence[str]) -> None:
    """Patch the measurement when it is imported, if the engine is told a fraction. Runs before sglang is imported."""
    if ARGUMENT in argv:
        after_import("sglang.srt.distributed.bootstrap", measure_the_whole)


def measure_the_whole(module: Any) -> None:
    """Patch the measurement. SGLang leaves the measured size times (1 - fraction) free: the size that is returned makes
    that all that was free beyond the fraction of the whole."""
    measure = module.measure_pre_model_load_memory

    def measured(**given: Any) -> float:
        import torch
        from sglang.srt.runtime_context import get_schedule

        free, fraction = measure(**given), get_schedule().mem_fraction_static
        whole = torch.cuda.mem_get_info()[1] / GIB
        if (spare := free - fraction * whole) < 0:
            raise ValueError(
                f"mem_fraction_static={fraction} (engine.memory_fraction) of this GPU's {whole:.1f} GiB is more than "
                f"the {free:.1f} GiB that are free: set at most {int(100 * free / whole) / 100}, or end what else uses "
                "the GPU."
            )
        return float(spare / (1 - fraction))

    module.measure_pre_model_load_memory = measured
