"""The experts of an answer's tokens, put together from its parts.

SGLang (0.5.21: srt/state_capturer, srt/managers/scheduler_components) keeps them beside its KV cache, and tells with
the last piece of a sample those of the positions from routed_experts_start_len to the last token that it read: all
tokens but the last that it wrote. So each part is asked for what the parts before it have not told:

    prompt p p p, answer a a a a, cut after two
    first part    0 .. 4    p p p a        (none at all when its stream broke, or it waited in the queue)
    second part   4 .. 6    a a            asked with routed_experts_start_len=4, of a prompt of 5 tokens

Of the tokens before a cut these are the experts that really read them when the next one was written. A request that an
engine retracts (memory, or weights.pause_mode=retract) is the exception: it is read anew, and told as it was read then.
"""

from __future__ import annotations

import msgspec

from asyncrl.engine.answer import Answer
from asyncrl.errors import EngineError
from asyncrl.routing import RoutingShape, compact
from asyncrl.types import Completion, Routing


def known_rows(routed: list[int], token_ids: list[int]) -> int:
    """How many of these tokens begin `routed`, and are not its last: their experts were told with an earlier turn."""
    return max(0, len(routed) - 1) if token_ids[: len(routed)] == routed else 0


class Routed:
    """The rows of one answer so far; of nothing where `shape` is None."""

    def __init__(self, shape: RoutingShape | None, first: Answer) -> None:
        self._shape, self._start, self._rows = shape, first.routed_from, bytearray()
        self.add(first)

    @property
    def end(self) -> int:
        """Position of the first token whose experts are not known."""
        return self._start + len(self._rows) // self._shape.width if self._shape else 0

    def add(self, part: Answer) -> None:
        """The next part. Raises EngineError when it tells of another model."""
        if self._shape is None or part.last is None or part.last.routed_experts is None:
            return
        try:
            rows = compact(part.last.routed_experts, self._shape)
        except ValueError as error:
            raise EngineError(f"the engine's routed experts are not the model's: {error}") from None
        self._rows += rows[(self.end - part.routed_from) * self._shape.width :]

    def into(self, completion: Completion, prompt: int, last: Answer) -> Completion:
        """The completion of a prompt of so many tokens, with its rows. Raises EngineError when an engine that came to
        its end told fewer; of what was cut after its last token some may be missing, and the trainer chooses."""
        if self._shape is None:
            return completion
        read = prompt + len(completion.token_ids) - 1
        if self.end < read and not last.ended_when_cut:
            raise EngineError(
                f"the engine told the experts of {self.end} of {read} tokens: was it started with "
                "--enable-return-routed-experts, and does its model tell them?"
            )
        rows = bytes(self._rows[: (read - self._start) * self._shape.width])
        return msgspec.structs.replace(completion, routing=Routing(self._start, self._shape.width, rows))
