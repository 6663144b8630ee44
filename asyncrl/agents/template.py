"""Incremental use of a model's chat template, which never renders or tokenizes the model's output again.

A turn's context consists of the exact ids of the turn before, the model's output, and what the template puts after it:

    begin     <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n
    written   4<|im_end|>
    extend    \\n<|im_start|>user\\nsure?<|im_end|>\\n<|im_start|>assistant\\n

Rendering the whole chat again would change ids: text does not determine its tokenization, and templates rewrite earlier
turns (Qwen3's removes their thinking). So `extend` renders the new messages after a placeholder, and takes what follows
it. (slime and miles call this token-in-token-out; TRL #5224 and verl #6719 show the bugs that occur without it.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError
from asyncrl.images import without_images
from asyncrl.schema import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "\u241ewritten\u241e"
"""Placeholder for the model's output. No template changes it, and no message contains it."""


class ChatTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: Mapping[str, Any] | None = None) -> None:
        """`params` are variables of the template (model.chat_template_kwargs). Raises ConfigError for one that the
        template does not mention, which Jinja would ignore."""
        self._tokenizer, self._params = tokenizer, dict(params or {})
        for name, value in self._params.items():
            if not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
                remedy = "The model's chat template does not mention it: check the spelling, or remove it."
                raise ConfigError(f"model.chat_template_kwargs.{name}", value, remedy)

    def begin(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the tokens of a new chat up to the generation prompt. `tools` have the OpenAI API's format."""
        ids: list[int] = self._tokenizer.apply_chat_template(
            without_images(messages),
            tools=list(tools) or None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self._params,
        )
        return list(ids)

    def extend(self, messages: Sequence[Message], *, last: int | None) -> list[int]:
        """Return the tokens that follow a completion whose last token is `last`, up to the next generation prompt.

        They are what the template puts after a completion, without its first token if that is `last`, followed by the
        new messages.
        """
        head: list[Any] = [{"role": "user", "content": "."}, {"role": "assistant", "content": PLACEHOLDER}]
        text: str = self._tokenizer.apply_chat_template(
            [*head, *without_images(messages)],
            add_generation_prompt=True,
            tokenize=False,
            return_dict=False,
            **self._params,
        )
        _, found, after = text.partition(PLACEHOLDER)
        if not found:
            raise ValueError(
                "the chat template does not render the assistant's messages, so no further turn is possible"
            )
        ids: list[int] = self._tokenizer.encode(after, add_special_tokens=False)
        return ids[1:] if ids and ids[0] == last else ids

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Return the tokens of a text.

        A text that `begins` a context gets the tokenizer's special tokens. A second BOS token is dropped, since a chat
        that was rendered elsewhere has one already.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=begins)
        twice = begins and len(ids) > 1 and ids[0] == ids[1] == self._tokenizer.bos_token_id
        return ids[1:] if twice else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def spell(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens as it is, with special tokens."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    @property
    def end(self) -> str:
        """The tokenizer's EOS token. Engines may stop at further tokens, which the model's generation config names."""
        return str(self._tokenizer.eos_token)
