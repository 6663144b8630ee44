"""Hook into SGLang's overlap scheduler: an in-place pause first completes the step in flight.

SGLang 0.5.21 launches a step before it processes the results of the step before. Its in-place pause only sets a flag:
the results of the launched step wait in a queue until generation continues. By then the version has changed, so each
request's token of that step would be recorded under the new version, although the old weights made it. Nor would the
copies of new weights wait for the step.

The hook leaves the results in the queue as processed, because the event loop takes one out for each step that it
launched. Its overlap goes on as before.
"""

from __future__ import annotations

from typing import Any

from asyncrl.importing import after_import


def install() -> None:
    """Patch the scheduler when it is imported. Runs in every process of a server, before sglang is imported."""
    after_import("sglang.srt.managers.scheduler", complete_steps_before_pauses)


class Processed:
    """Stands in the queue for results that are processed."""


def complete_steps_before_pauses(module: Any) -> None:
    """Patch SGLang's Scheduler, the class of this module."""
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
