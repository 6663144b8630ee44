"""Assembly of the routed experts of an answer's tokens from the answer's parts.

SGLang (0.5.21: srt/state_capturer, srt/managers/scheduler_components) stores the experts beside its KV cache. The last
chunk of a sample contains those of the positions from routed_experts_start_len to the last token that the engine read,
which is every token except the last one that it generated. Each part requests only what the earlier parts lack:

    prompt p p p, answer a a a a, cut after two
    first part    0 .. 4    p p p a        (none if its stream broke, or if it was still in the queue)
    second part   4 .. 6    a a            requested with routed_experts_start_len=4, for a prompt of 5 tokens

The experts of the tokens before a cut are those that read them when the next token was generated. The exception is a
request that an engine retracts (memory, or weights.pause_mode=retract): it is prefilled again, and the engine reports
the experts of that prefill.
"""

from __future__ import annotations

import msgspec

from asyncrl.engine.request import PartialAnswer
from asyncrl.errors import EngineError
from asyncrl.routing import RoutingShape, compact
from asyncrl.schema import Completion, Routing


def known_rows(routed: list[int], token_ids: list[int]) -> int:
    """Return the number of tokens whose experts are known from an earlier turn.

    These are all of `routed` except its last token if `token_ids` begins with `routed`, and none otherwise.
    """
    return max(0, len(routed) - 1) if token_ids[: len(routed)] == routed else 0


class ExpertRoutingAssembler:
    """Collector of the expert rows of one answer. It collects nothing when `shape` is None."""

    def __init__(self, shape: RoutingShape | None, first: PartialAnswer) -> None:
        self._shape = shape
        self._start = first.routed_from
        self._rows = bytearray()
        self.add(first)

    @property
    def end(self) -> int:
        """Position of the first token whose experts are not known."""
        return self._start + len(self._rows) // self._shape.width if self._shape else 0

    def add(self, part: PartialAnswer) -> None:
        """Add the rows of the next part. Raises EngineError when they do not fit the model's shape."""
        if self._shape is None or part.last is None or part.last.routed_experts is None:
            return
        try:
            rows = compact(part.last.routed_experts, self._shape)
        except ValueError as error:
            raise EngineError(f"the engine returned routed experts that do not fit the model: {error}") from None
        self._rows += rows[(self.end - part.routed_from) * self._shape.width :]

    def into(self, completion: Completion, prompt: int, last: PartialAnswer) -> Completion:
        """Return the completion of a prompt of `prompt` tokens with its expert rows.

        Raises EngineError when an engine finished the answer but reported too few rows. When the answer was interrupted
        after its last token, rows may be missing, and the trainer routes those tokens itself.
        """
        if self._shape is None:
            return completion
        read = prompt + len(completion.token_ids) - 1
        if self.end < read and not last.ended_early:
            raise EngineError(
                f"the engine reported the experts of {self.end} of {read} tokens: was it started with "
                "--enable-return-routed-experts, and does its model report them?"
            )
        rows = bytes(self._rows[: (read - self._start) * self._shape.width])
        return msgspec.structs.replace(completion, routing=Routing(self._start, self._shape.width, rows))
