"""A model's chat template, applied piece by piece: what was written is never rendered, nor tokenised, again.

A turn's context is the exact ids of the turn before, what the model wrote, and what the template puts after it:

    begin     <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n
    written   4<|im_end|>
    extend    \\n<|im_start|>user\\nsure?<|im_end|>\\n<|im_start|>assistant\\n

To render the whole chat anew would change ids: text does not tell how it was tokenised, and templates rewrite earlier
turns (Qwen3's takes their thoughts out). So `extend` renders the new messages behind a placeholder, and takes what
comes after it. (slime and miles call this token-in-token-out; TRL #5224 and verl #6719 show what its lack does.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "\u241ewritten\u241e"
"""Stands where the model wrote; no template changes it, and no message holds it."""


class ChatTemplate:
    """The template of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def begin(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """A chat from its start, up to where the model writes; `tools` are functions as the OpenAI API has them."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(ids)

    def extend(self, messages: Sequence[Message], *, last: int | None) -> list[int]:
        """What follows a completion whose last token is `last`: the end that the template gives it, unless that is it,
        and these messages, up to where the model writes again."""
        head: list[Any] = [{"role": "user", "content": "."}, {"role": "assistant", "content": PLACEHOLDER}]
        text: str = self._tokenizer.apply_chat_template(
            [*head, *messages], add_generation_prompt=True, tokenize=False, return_dict=False
        )
        _, found, after = text.partition(PLACEHOLDER)
        if not found:
            raise ValueError("the chat template does not show what the assistant wrote: no turn can follow")
        ids: list[int] = self._tokenizer.encode(after, add_special_tokens=False)
        return ids[1:] if ids and ids[0] == last else ids

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """A text; one that begins a context gets what the tokenizer begins with, unless it says so itself: a chat that
        was rendered elsewhere does."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=begins)
        twice = begins and len(ids) > 1 and ids[0] == ids[1] == self._tokenizer.bos_token_id
        return ids[1:] if twice else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @property
    def end(self) -> str:
        """The tokenizer's own end; engines may stop at further tokens, which the model's generation config names."""
        return str(self._tokenizer.eos_token)
