"""The experts of an answer's tokens, put together from what engines report with the parts of it.

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

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from asyncrl.engine.session import GenerationSession, Request
from asyncrl.errors import EngineError
from asyncrl.extension import PlayerHooks
from asyncrl.extensions.routing_replay.encoding import RoutingShape, compact, share_prompt
from asyncrl.schema import Completion, Group, TokenRows


class ReportedExperts(PlayerHooks):
    """Asks engines for the experts of every token of requests for training."""

    reads = {"routed_experts": bytes}  # noqa: RUF012

    def __init__(self, shape: RoutingShape) -> None:
        self._shape = shape
        self._known: WeakKeyDictionary[Request, TokenRows] = WeakKeyDictionary()  # of the parts that have ended
        self._asked_from: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._routed: WeakKeyDictionary[GenerationSession, list[int]] = WeakKeyDictionary()
        # tokens of a session's last request and its answer, with known experts

    def _first_unknown(self, request: Request) -> int:
        """Return the position of the first token whose experts are not known from an earlier part or turn. A turn tells
        all but those of its last token, if the context begins with it."""
        if known := self._known.get(request):
            return known.end
        routed = self._routed.get(request.session, [])
        return max(0, len(routed) - 1) if request.context[: len(routed)] == routed else 0

    def asks(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Ask for the experts from the first token on that one of the siblings lacks."""
        if requests[0].purpose != "training":
            return {}
        start = min(self._first_unknown(request) for request in requests)
        for request in requests:
            self._asked_from[request] = start
        return {"return_routed_experts": True, "routed_experts_start_len": start}

    def part(self, request: Request) -> None:
        """Add the experts of the part that ended last. Raises EngineError when they do not fit the model."""
        if request.purpose != "training":
            return
        start = self._asked_from.get(request, self._first_unknown(request))
        known = self._known.get(request) or TokenRows(start, self._shape.width, b"")
        last, rows = request.parts[-1].last, b""
        if last is not None and last.routed_experts is not None:  # type: ignore[attr-defined]
            try:
                rows = compact(last.routed_experts, self._shape)  # type: ignore[attr-defined]
            except ValueError as error:
                raise EngineError(f"the engine returned routed experts that do not fit the model: {error}") from None
        self._known[request] = TokenRows(known.start, known.width, known.rows + rows)  # it began where the last ended

    def completed(self, request: Request, completion: Completion) -> Completion:
        """Return the completion with its experts.

        Raises EngineError when an engine finished the answer but reported too few experts. When the answer was
        interrupted after its last token, some may be missing, and the trainer routes those tokens itself.
        """
        if request.parts and request.purpose == "training":
            completion = self._with_experts(request, completion)
        tokens = [*request.context, *completion.token_ids]
        self._routed[request.session] = tokens if completion.token_rows else []
        return completion

    def _with_experts(self, request: Request, completion: Completion) -> Completion:
        known = self._known.pop(request)
        read = len(request.context) + len(completion.token_ids) - 1
        if known.end < read and not request.parts[-1].ended:
            raise EngineError(
                f"the engine reported the experts of {known.end} of {read} tokens: was it started with "
                "--enable-return-routed-experts, and does its model report them?"
            )
        rows = known.rows[: (read - known.start) * known.width]
        return msgspec.structs.replace(completion, token_rows=TokenRows(known.start, known.width, rows))

    def played(self, group: Group) -> Group:
        """Store the rows of the group's prompt once."""
        return share_prompt(group)
