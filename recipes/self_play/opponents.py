"""Fixed opponents that play a role in place of the policy: a model behind an OpenAI-compatible endpoint, or a function.

Their answers are not trained.

waits for     the endpoint: `timeout` seconds for an answer, 1 + `max_retries` times
on a hang     EpisodeFailed("opponent"): the episode is lost, and no role gets a reward for it
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.schema import Message
from asyncrl.user_code import load

if TYPE_CHECKING:
    from openai import AsyncOpenAI

Opponent = Callable[[Sequence[Message]], str | Awaitable[str]]
"""Function that takes a role's observations and answers so far and returns its next answer. One opponent serves all
episodes, many of them concurrently."""


class Endpoint:
    """Opponent that is a model behind /v1/chat/completions."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
        **fields: Any,
    ) -> None:
        """Create an opponent. Raises ConfigError when the environment variable of the key is not set.

        api_key_env: environment variable that holds the key; None when the endpoint needs no key
        timeout: seconds for an answer
        fields: further fields of every request, such as temperature and max_tokens
        """
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ConfigError("api_key_env", api_key_env, "There is no such environment variable: set it to the key.")
        self._base_url, self._model, self._fields = base_url, model, fields
        self._limits: dict[str, Any] = {"timeout": timeout, "max_retries": max_retries}
        self._key = os.environ[api_key_env] if api_key_env else "none"
        self._client: AsyncOpenAI | None = None

    async def __call__(self, messages: Sequence[Message]) -> str:
        """Return the opponent's answer. Raises EpisodeFailed when the endpoint cannot answer."""
        from openai import AsyncOpenAI, OpenAIError

        if self._client is None:  # created here, inside its event loop
            self._client = AsyncOpenAI(base_url=self._base_url, api_key=self._key, **self._limits)
        try:
            chat: Any = list(messages)
            answer = await self._client.chat.completions.create(model=self._model, messages=chat, **self._fields)
        except OpenAIError as error:
            raise EpisodeFailed("opponent", f"{self._model} at {self._base_url}: {error}") from error
        return answer.choices[0].message.content or ""


def opponent(settings: Mapping[str, Any], field: str) -> Opponent:
    """Build an opponent from agent_params: {function: module:name} or arguments of Endpoint. Raises ConfigError."""
    if settings.keys() == {"function"}:
        function: Opponent = load(settings["function"], f"{field}.function")
        return function
    if not {"base_url", "model"} <= settings.keys() or "function" in settings:
        remedy = "Must be {function: module:name}, or {base_url: …, model: …} of an endpoint (recipes/self_play)."
        raise ConfigError(field, dict(settings), remedy)
    try:
        return Endpoint(**settings)
    except ConfigError as error:
        raise ConfigError(f"{field}.{error.field}", error.value, error.remedy) from None
