"""Hooks into SGLang 0.5.21, which every server of a run installs before it imports SGLang (serve.py).

pauses        an in-place pause first completes the step in flight
unloading     an adapter is unloaded as soon as no request has it
memory        is released once, however often it is asked for
stages        engines with pipeline stages or replicas take new weights
share         a fraction of a GPU (engine.memory_fraction) is one of the whole GPU
metrics       have a key of their own
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from asyncrl.import_hooks import after_import
from asyncrl.network.addresses import metrics_key

MEMORY_FRACTION = "--mem-fraction-static"
"""Argument of engines that are told a fraction of a GPU."""
GIB = 1 << 30
POLL_SECONDS = 0.005
CALLS = (
    "begin_weight_update",
    "end_weight_update",
    "init_weights_update_group",
    "destroy_weights_update_group",
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "update_weights_from_disk",
    "release_memory_occupation",
    "resume_memory_occupation",
)
"""Requests that every stage answers."""


def install(argv: Sequence[str]) -> None:
    """Patch SGLang's classes when they are imported, in a server with these arguments and in all of its processes."""
    after_import("sglang.srt.utils.auth", guard_metrics)
    after_import("sglang.srt.managers.scheduler", complete_steps_before_pauses)
    after_import("sglang.srt.managers.scheduler", pass_on_first)
    after_import("sglang.srt.managers.scheduler_components.weight_updater", release_once)
    after_import("sglang.srt.managers.scheduler_components.weight_updater", answer_for_all)
    after_import("sglang.srt.managers.communicator", report_failures_first)
    after_import("sglang.srt.managers.tp_worker", open_own_handle)
    after_import("sglang.srt.model_executor.model_runner_components.weight_updater", join_as_own_rank)
    after_import("sglang.srt.managers.tokenizer_manager", wait_for_requests)
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


# -- unloading ---------------------------------------------------------------------------------------------


def wait_for_requests(module: Any) -> None:
    """Patch TokenizerManager: unloading an adapter waits for the requests that there are, not for a counter.

    SGLang counts the requests of each adapter, and unloads it when the counter is 0. A request with n samples adds n
    and subtracts n + 1, because its prefix is prefilled by a request of its own; one that its client cancels before it
    reaches the scheduler subtracts nothing. The counter is then never 0, and the unload holds its lock for ever, so
    that no other adapter can be loaded. An unload has the deadline of its caller, weights.timeout, after which the
    engine is lost.

    SGLang also keeps n - 1 of the states that it creates for a request with n samples before it sends them; the hook
    deletes them when the request has ended.
    """
    manager_class = module.TokenizerManager
    init, handle = manager_class.init_lora, manager_class._handle_batch_request

    def init_lora(self: Any) -> None:
        init(self)

        async def wait_for_unload(lora_id: str) -> None:
            while any(state.obj.lora_id == lora_id for state in self.rid_to_state.values()):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

        self.lora_registry.wait_for_unload = wait_for_unload

    async def handle_batch_request(self: Any, obj: Any, *rest: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(handle(self, obj, *rest)) as responses:
                async for response in responses:
                    yield response
        finally:
            for rid in obj.rid:
                if (state := self.rid_to_state.get(rid)) and not state.dispatched:
                    del self.rid_to_state[rid]

    manager_class.init_lora = init_lora
    manager_class._handle_batch_request = handle_batch_request


# -- memory ------------------------------------------------------------------------------------------------


def release_once(module: Any) -> None:
    """Patch SchedulerWeightUpdaterManager: memory that is released already is left alone.

    SGLang would copy buffers that have no memory, and end. Trainers that start again do not know what those that died
    had released (engine/hand_over.py).
    """
    manager = module.SchedulerWeightUpdaterManager
    release = manager.release_memory_occupation

    def release_memory_occupation(self: Any, request: Any) -> Any:
        request.tags = [tag for tag in request.tags or module.GPU_MEMORY_ALL_TYPES if tag not in self.offload_tags]
        return release(self, request) if request.tags else module.ReleaseMemoryOccupationReqOutput()

    manager.release_memory_occupation = release_memory_occupation


# -- stages and replicas -----------------------------------------------------------------------------------
#
# SGLang passes a request on to the next stage only after it has processed it, so that a stage would wait for ever for
# the others to join a group or a broadcast. It numbers the ranks of every stage from 0, in the group as well as in the
# list of handles; it answers for the first stage alone; and it collects checksums from one stage. With the hooks,
# requests are passed on first, ranks are those of the whole engine, and an answer is that of all stages.
#
# Every replica of attention answers for itself, and SGLang reports a flush as done if the first of them has flushed.
# With the hooks, a flush fails as long as one of them refuses it because it has requests. Stages need no such hook: at
# the same turn of their loops they have the same requests, so that all of them flush or none. Nor could they wait for
# each other while they have any: a stage takes the outputs of the one before in a later turn, and sending them ends
# only then.


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def first_rank() -> int:
    """Return the number that the first rank of this process's stage has in the engine."""
    return int(_parallel().pp_rank * _parallel().tp_size)


def own_rank() -> int:
    """Return the number of this process's rank in the engine."""
    return first_rank() + int(_parallel().tp_rank)


def pass_on_first(module: Any) -> None:
    """Patch Scheduler: requests go to the next stage before they are processed."""
    scheduler = module.Scheduler
    process, send = scheduler.process_input_requests, scheduler._pp_send_pyobj_to_next_stage

    def process_input_requests(self: Any, requests: list[Any]) -> None:
        if _parallel().pp_rank < _parallel().pp_size - 1:
            self._pp_commit_comm_work(self.send_req_work)
            self.asyncrl_passed_on = requests, send(self, requests, async_send=True)
        process(self, requests)

    def send_to_next_stage(self: Any, data: Any, async_send: bool = False) -> Any:
        passed_on, sending = getattr(self, "asyncrl_passed_on", (None, None))
        return sending if data is passed_on else send(self, data, async_send=async_send)

    scheduler.process_input_requests = process_input_requests
    scheduler._pp_send_pyobj_to_next_stage = send_to_next_stage


def answer_for_all(module: Any) -> None:
    """Patch SchedulerWeightUpdaterManager: every stage waits for the others, and answers for them."""
    manager = module.SchedulerWeightUpdaterManager
    for name in CALLS:
        setattr(manager, name, _of_all_stages(getattr(manager, name)))
    check = manager.check_weights

    def check_weights(self: Any, request: Any) -> Any:
        if _parallel().pp_size == 1:
            return check(self, request)
        of_stage, self.tp_cpu_group = self.tp_cpu_group, _everybody()  # from which SGLang collects the checksums
        try:
            return check(self, request)
        finally:
            self.tp_cpu_group = of_stage

    manager.check_weights = check_weights


def report_failures_first(module: Any) -> None:
    """Patch FanOutCommunicator: answers of replicas that failed come first. SGLang reports the first one of a flush."""
    communicator = module.FanOutCommunicator
    ask = communicator.__call__

    async def ask_all(self: Any, request: Any) -> list[Any]:
        return sorted(await ask(self, request), key=lambda answer: getattr(answer, "success", True))

    communicator.__call__ = ask_all


def _of_all_stages(call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def called(self: Any, request: Any) -> Any:
        answer = call(self, request)
        if _parallel().pp_size > 1:
            import torch.distributed as dist

            answers: list[Any] = [None] * dist.get_world_size()
            own = (getattr(answer, "success", True), getattr(answer, "message", ""))
            dist.all_gather_object(answers, own, group=_everybody())
            if hasattr(answer, "success"):
                answer.success, answer.message = min(answers, key=lambda one: one[0])
        return answer

    return called


def _everybody() -> Any:
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group().cpu_group


def open_own_handle(module: Any) -> None:
    """Patch the worker: each rank opens the handle of its number in the engine."""
    worker = module.BaseTpWorker
    deserialize = worker.deserialize_own_rank

    def deserialize_own_rank(self: Any, handles: list[Any]) -> Any:
        return deserialize(self, handles[first_rank() :])

    worker.deserialize_own_rank = deserialize_own_rank


def join_as_own_rank(module: Any) -> None:
    """Patch WeightUpdater: each rank joins a group under its number in the engine."""
    updater = module.WeightUpdater
    join = updater.init_weights_update_group

    def init_weights_update_group(self: Any, address: str, port: int, offset: int, *rest: Any) -> Any:
        return join(self, address, port, offset + first_rank(), *rest)

    updater.init_weights_update_group = init_weights_update_group


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
