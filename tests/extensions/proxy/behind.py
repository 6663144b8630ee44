"""Tokenizers, models and sessions for the proxy's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from asyncrl.agents.template import ChatTemplate
from asyncrl.extensions.proxy.session import ProxySession, ProxyStats
from asyncrl.models.tiny import BOS, CHAT_TEMPLATE, EOS, PAD, TOKENS, UNK
from asyncrl.schema import Completion, Generate, Message, Template
from tests.agents.talking import Talking

EOS_ID, ASKS, BOS_ID = TOKENS.index(EOS), TOKENS.index("="), TOKENS.index(BOS)
PAIR = len(TOKENS)
"""The token "12", which text "12" is tokenised to; a model may write "1" and then "2"."""
DEADLINE = 20.0
"""Seconds, for waits that should take none."""

CALLS = (
    "{{ '<bos>' }}{% for tool in tools or [] %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '=' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call['function']['arguments']['a'] }}{% endfor %}{{ '<eos>' }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)


@cache
def template(chat_template: str = CHAT_TEMPLATE) -> ChatTemplate:
    """Return a template whose vocabulary has texts of several tokens: the tiny model's, plus a pair of digits."""
    vocab = {token: i for i, token in enumerate([*TOKENS, "12"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("1", "2")], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (BOS, EOS, PAD, UNK)])
    names = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD, "unk_token": UNK}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names)
    wrapped.chat_template = chat_template
    return ChatTemplate(wrapped)


class Says(Template):
    """A template whose tokens stand for texts of one's own: token 100 is texts[0], and so on."""

    def __init__(self, inner: Template, *texts: str) -> None:
        self._inner, self._texts = inner, texts
        self.begin, self.extend, self.encode = inner.begin, inner.extend, inner.encode  # type: ignore[method-assign]

    end = EOS

    def decode(self, token_ids: Any) -> str:
        return "".join(self._texts[one - 100] if one >= 100 else self._inner.decode([one]) for one in token_ids)


class Blocking(Talking):
    """Answers when `go` is set; tells when it was asked, and when it was cancelled."""

    def __init__(self, *answers: Completion) -> None:
        super().__init__(answers, template())
        self.go, self.entered, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, token_ids: list[int], **options: Any) -> Completion:
        self.entered.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().__call__(token_ids, **options)


class Raising(Talking):
    """Raises what it is given."""

    def __init__(self, error: Exception) -> None:
        super().__init__([], template())
        self._error = error

    async def __call__(self, token_ids: list[int], **options: Any) -> Completion:
        raise self._error


@asynccontextmanager
async def session(generate: Generate, tool_format: str = "hermes") -> AsyncIterator[ProxySession]:
    """Return a session without a server."""
    async with ProxySession(generate, tool_format=tool_format, figures=ProxyStats()) as made:
        yield made


async def soon(happened: asyncio.Event) -> None:
    """Wait for it, within the deadline."""
    async with asyncio.timeout(DEADLINE):
        await happened.wait()


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}
