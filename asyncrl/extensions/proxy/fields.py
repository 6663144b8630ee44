"""Fields of a request, and the values of them that are refused.

The trainer recomputes the probability of every token from log_softmax(logits / temperature). Anything that samples from
another distribution (nucleus sampling, penalties, grammars, another temperature) is refused, because the training step
would be silently wrong. Unknown fields are refused too, because they may have the same effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.extensions.proxy.messages import bad_field

Body = Mapping[str, Any]
Route = Literal["chat", "text"]

_DISTRIBUTION = "Remove it: the trainer could not reproduce the distribution that the tokens were drawn from."
_SHAPING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
_OTHER: dict[str, tuple[tuple[Any, ...], str]] = {
    "parallel_tool_calls": ((True,), "Remove it: nothing keeps the model from writing two calls."),
    "top_logprobs": ((0,), "Remove it: the engine tells the log-probabilities of the tokens that were drawn."),
    "best_of": ((1,), "Remove it: what is not shown would be trained too. Ask for n, and choose."),
    "echo": ((False,), "Remove it: log-probabilities of a prompt are not computed."),
    "suffix": (("",), "Remove it: text is written at the end alone."),
    "modalities": ((["text"],), "Remove it: the model writes text."),
}
_READ = {"model", "stream", "stream_options", "max_tokens", "n", "logprobs", "temperature", "stop", "return_token_ids"}
_READ_BY: dict[Route, set[str]] = {
    "chat": _READ | {"messages", "tools", "tool_choice", "max_completion_tokens"},
    "text": _READ | {"prompt"},
}
_WITHOUT_EFFECT = {
    "user",
    "seed",  # ignored: siblings must differ, and OpenAI calls it best effort too
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
}
MOST_CHOICES = 128


@dataclass(frozen=True)
class RequestOptions:
    """Options of a request."""

    model: str
    limit: int | None  # tokens
    choices: int
    stream: bool
    usage: bool  # include the usage in the stream
    logprobs: bool
    token_ids: bool
    stop: Sequence[str] = ()  # texts at which the client's copy of an answer ends

    def cut(self, text: str) -> tuple[str, str | None]:
        """Return the text up to the first of `stop`, and which it was."""
        found = [(place, one) for one in self.stop if (place := text.find(one)) >= 0]
        place, stop = min(found, default=(len(text), None))
        return text[:place], stop


def read(body: Body, route: Route, *, temperature: float, end: str) -> RequestOptions:
    """Read the options of a request. Raises ApiError (400) for fields that training does not allow.

    `temperature` is the run's sampling temperature, and `end` the text of the token that ends its answers.
    """
    for name, value in body.items():
        if value is not None:
            _check(name, value, route)
    if body.get("temperature") not in (None, temperature):
        remedy = f"Remove it, or train at it: rollout.temperature is {temperature}."
        raise bad_field("temperature", body["temperature"], remedy)
    stop = body.get("stop") or []
    stops = stop if isinstance(stop, list) else [stop]
    if not all(isinstance(one, str) and one for one in stops):
        raise bad_field("stop", stop, "Must be a text, or a list of texts.")
    limits = [_whole(body, name, 1) for name in ("max_tokens", "max_completion_tokens")]
    options = _typed(body, "stream_options", dict, "an object") or {}
    return RequestOptions(
        model=_typed(body, "model", str, "a text") or "policy",
        limit=min((limit for limit in limits if limit is not None), default=None),
        choices=_whole(body, "n", 1, MOST_CHOICES) or 1,
        stream=bool(_typed(body, "stream", bool, "true or false")),
        usage=bool(options.get("include_usage")),
        logprobs=_logprobs(body, route),
        token_ids=bool(_typed(body, "return_token_ids", bool, "true or false")),
        stop=tuple(one for one in stops if one != end),  # answers end there anyway, and its text is not shown
    )


def _check(name: str, value: Any, route: Route) -> None:
    if name in _SHAPING and value not in _SHAPING[name]:
        raise bad_field(name, value, _DISTRIBUTION)
    if name in _OTHER and value not in _OTHER[name][0]:
        raise bad_field(name, value, _OTHER[name][1])
    if name not in _SHAPING.keys() | _OTHER.keys() | _READ_BY[route] | _WITHOUT_EFFECT:
        raise bad_field(name, value, "Remove it: the proxy does not know it, and it may change how tokens are drawn.")


def _logprobs(body: Body, route: Route) -> bool:
    """Return whether log-probabilities are requested.

    The field is a boolean for chats. For texts it is the number of alternatives to each sampled token, which must be 0.
    """
    if route == "chat":
        return bool(_typed(body, "logprobs", bool, "true or false"))
    if body.get("logprobs") not in (None, 0):
        raise bad_field("logprobs", body["logprobs"], "Must be 0: alternatives to the tokens drawn are not computed.")
    return body.get("logprobs") is not None


def _whole(body: Body, name: str, least: int, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least or (most is not None and value > most):
        raise bad_field(name, value, f"Must be a whole number from {least}" + (f" to {most}." if most else "."))
    return value


def _typed(body: Body, name: str, kind: type, words: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise bad_field(name, value, f"Must be {words}.")
    return value
