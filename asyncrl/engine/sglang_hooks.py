"""Hooks into SGLang 0.5.21, which every server of a run installs before it imports SGLang (serve.py).

pauses        an in-place pause first completes the step in flight
share         a fraction of a GPU (engine.memory_fraction) is one of the whole GPU
metrics       have a key of their own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.import_hooks import after_import
from asyncrl.network.addresses import metrics_key

MEMORY_FRACTION = "--mem-fraction-static"
"""Argument of engines that are told a fraction of a GPU."""
GIB = 1 << 30


def install(argv: Sequence[str]) -> None:
    """Patch SGLang's classes when they are imported, in a server with these arguments and in all of its processes."""
    after_import("sglang.srt.utils.auth", guard_metrics)
    after_import("sglang.srt.managers.scheduler", complete_steps_before_pauses)
    if MEMORY_FRACTION in argv:
        after_import("sglang.srt.distributed.bootstrap", measure_the_whole)


def guard_metrics(module: Any) -> None:
    """Patch SGLang's decision on requests: metrics need a key of their own. The router hands the run's key on for
    anyone who asks for its /engine_metrics, but does not have this one."""
    decide = module.decide_request_auth

    def decision(*, path: str, api_key: str | None, **given: Any) -> Any:
        if path.startswith("/metrics") and api_key:
            key = metrics_key(api_key)
            return decide(**given | {"path": "/guarded", "api_key": key, "admin_api_key": key})
        return decide(path=path, api_key=api_key, **given)

    module.decide_request_auth = decision


# -- pauses ------------------------------------------------------------------------------------------------


class Processed:
    """Stands in the queue for results that are processed."""


def complete_steps_before_pauses(module: Any) -> None:
    """Patch Scheduler: an in-place pause first completes the step in flight.

    SGLang launches a step before it processes the results of the step before. Its in-place pause only sets a flag: the
    results of the launched step wait in a queue until generation continues. By then the version has changed, so each
    request's token of that step would be recorded under the new version, although the old weights made it. Nor would
    the copies of new weights wait for the step.

    The results stay in the queue as processed, because the event loop takes one out for each step that it launched. Its
    overlap goes on as before.
    """
    scheduler_class = module.Scheduler
    pause, process = scheduler_class.pause_generation, scheduler_class.process_batch_result

    def pause_generation(self: Any, request: Any) -> Any:
        answer = pause(self, request)
        if request.mode == "in_place" and self.enable_overlap:
            _complete(self)
        return answer

    def process_batch_result(self: Any, batch: Any, result: Any) -> None:
        if not isinstance(result, Processed):
            process(self, batch, result)

    scheduler_class.pause_generation = pause_generation
    scheduler_class.process_batch_result = process_batch_result


def _complete(scheduler: Any) -> None:
    """Process the results of every launched step, which waits for the step, and order later copies behind it."""
    for place, (batch, result) in enumerate(scheduler.result_queue):
        scheduler.process_batch_result(batch, result)
        scheduler.result_queue[place] = (batch, Processed())
    scheduler.schedule_stream.wait_stream(scheduler.forward_stream)


# -- a share of a GPU --------------------------------------------------------------------------------------


def measure_the_whole(module: Any) -> None:
    """Patch the measurement of the memory from which an engine with a fraction sizes its KV cache.

    SGLang multiplies the fraction by the memory that is free when the engine starts, and gives weights and KV cache
    that much (mem_cache/kv_cache_configurator.py). An engine that is restarted beside a trainer on its GPU finds little
    free, and would have a smaller cache, or none. With the hook it gets the fraction of the whole memory each time:
    SGLang leaves the measured size times (1 - fraction) free, and the size that is returned makes that all that was
    free beyond the fraction of the whole.
    """
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
