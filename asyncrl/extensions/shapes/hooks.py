"""Hooks into SGLang 0.5.21 for engines with pipeline stages or replicas of attention.

SGLang passes a request on to the next stage only after it has processed it, so that a stage would wait for ever for
the others to join a group or a broadcast. It numbers the ranks of every stage from 0, in the group as well as in the
list of handles; it answers for the first stage alone; and it collects checksums from one stage. With the hooks,
requests are passed on first, ranks are those of the whole engine, and an answer is that of all stages.

Every replica of attention answers for itself, and SGLang reports a flush as done if the first of them has flushed.
With the hooks, a flush fails as long as one of them refuses it because it has requests. Stages need no such hook: at
the same turn of their loops they have the same requests, so that all of them flush or none. Nor could they wait for
each other while they have any: a stage takes the outputs of the one before in a later turn, and sending them ends
only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.import_hooks import after_import

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
    if "--dp-size" in argv:
        after_import("sglang.srt.managers.communicator", report_failures_first)
    if "--pp-size" in argv:
        after_import("sglang.srt.managers.scheduler", pass_on_first)
        after_import("sglang.srt.managers.scheduler_components.weight_updater", answer_for_all)
        after_import("sglang.srt.managers.tp_worker", open_own_handle)
        after_import("sglang.srt.model_executor.model_runner_components.weight_updater", join_as_own_rank)


def _parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def first_rank() -> int:
    """Return the number that the first rank of this process's stage has in the engine."""
    return int(_parallel().pp_rank * _parallel().tp_size)


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
