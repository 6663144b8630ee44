"""Conversations to learn from: the rows of task.kind=chat, and the tokens that are trained of each.

A row has a conversation in the field `task.prompt_key` (a list of messages, or the text of a user), and its end in
`task.answer_key`, if it has that field (a text, or a list of messages). `tools` are shown to the model. Every message
of the assistant is trained, after exactly what the chat template puts before it:

    context     <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n
    trained     4<|im_end|>
    context     \\n<|im_start|>user\\nsure?<|im_end|>\\n<|im_start|>assistant\\n
    trained     yes<|im_end|>

What the template puts behind its generation prompt is trained up to the token that ends an answer, which a model must
learn to write. Each part is tokenized by itself, as when a model continues a prompt. If a template changes earlier
turns (Qwen3's removes their thinking), the context begins anew, as it would in a conversation. A template that marks
what is generated (`{% generation %}`) is taken at its word instead.

A row with the field `rendered` has context and trained text, alternately, as a model has seen and written them
(asyncrl-inspect RUN --rows). No template is applied to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from jinja2 import TemplateError

from asyncrl.config import Config
from asyncrl.config import TaskConfig as TaskConfig
from asyncrl.errors import ConfigError
from asyncrl.rollout.parts import load_tokenizer, stop_tokens
from asyncrl.schema import Completion, Message, Trajectory, Turn, VersionSpan
from asyncrl.tasks import Question
from asyncrl.tasks.files import FileTask
from asyncrl.tasks.rows import rows_of_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT = "assistant"
RENDERED = "rendered"
"""Field of rows with texts in place of a conversation."""
MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""What a template that marks the generated text has, by which transformers knows it, too."""
LAST_TAG = re.compile(r"(<[^<>\s]+>)\s*$")
"""What a generation prompt may end with, as <think>."""


class Stored:
    """Values in a temporary file, in the order in which they were appended. Memory holds their places alone."""

    def __init__(self, kind: Any = Any) -> None:
        """`kind` is the type of the values."""
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  open as long as this object lives
        weakref.finalize(self, self._file.close)
        self._ends, self._kind = array("Q", [0]), kind

    def append(self, value: Any) -> None:
        """Write a value."""
        self._ends.append(self._ends[-1] + self._file.write(msgspec.msgpack.encode(value)))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Any:
        self._file.flush()
        start, end = self._ends[number], self._ends[number + 1]
        return msgspec.msgpack.decode(os.pread(self._file.fileno(), end - start, start), type=self._kind)


class ChatRows(FileTask):
    """Rows of files, or of splits of a dataset if `task.dataset` is set."""

    KEPT = Stored

    def __init__(self, config: TaskConfig) -> None:
        self.SOURCES = ("eval_split", "train_split") if config.dataset else FileTask.SOURCES
        super().__init__(config)

    def _read(self, field: str, source: str) -> Iterator[dict[str, Any]]:
        if (name := self._config.dataset) is None:
            return rows_of_file(field, source)
        try:
            from asyncrl.extensions.datasets.hf import HfTask
        except ModuleNotFoundError:
            remedy = "It needs the extension `datasets`, which is not installed: set task.train_file."
            raise ConfigError("task.dataset", name, remedy) from None
        return HfTask._read(self, field, source)  # type: ignore[arg-type]

    def _check(self, row: dict[str, Any], where: str) -> None:
        """Raise ConfigError for a row that is no conversation with an answer at its end."""
        config = self._config
        if row.get(RENDERED) is not None:
            _check_rendered(row[RENDERED], where)
            return
        if config.prompt_key not in row:
            raise ConfigError("task.prompt_key", config.prompt_key, f"{where} has only the fields {sorted(row)}.")
        if not isinstance(row.get("tools") or [], list):
            raise ConfigError("task.train_file", "tools", f"{where} has tools that are no list.")
        messages = self._conversation(row)
        shown = json.dumps(messages, default=str)[:120]
        for message in messages:
            known = isinstance(message, dict) and isinstance(message.get("role"), str) and _called(message) is not None
            if not known or not isinstance(message.get("content", ""), str | None):
                form = "a text, or a list of messages with role, a text as content, and names in tool_calls"
                remedy = f"{where} has {shown}: it must be {form}."
                raise ConfigError("task.prompt_key", config.prompt_key, remedy)
        if not messages or messages[-1]["role"] != ASSISTANT:
            remedy = (
                f"{where} ends without a message of the assistant ({shown}): nothing could be learned from its end."
            )
            raise ConfigError("task.answer_key", config.answer_key, remedy)

    def _conversation(self, row: dict[str, Any]) -> list[Any]:
        config, found = self._config, list[Any]()
        for key, role in ((config.prompt_key, "user"), (config.answer_key, ASSISTANT)):
            if (value := row.get(key)) is not None:
                given = [{"role": role, "content": value}] if isinstance(value, str) else value
                found += given if isinstance(given, list) else [given]  # what is no message is refused by its row
        return found

    def conversation(self, index: int) -> tuple[list[Message], list[Message]]:
        """Return the messages of a row, with the system message, and the tools."""
        row = self._rows[index]
        said = self._conversation(row)  # tables fill fields with nothing, because other rows have them
        found = [{name: value for name, value in message.items() if value is not None} for message in said]
        return [*self._head, *found], list(row.get("tools") or [])

    def named(self, index: int) -> str:
        """Return the name of a row in messages: its number in its own file or split."""
        held_out, trained = self.SOURCES
        if index < self.held_out:
            return f"Row {index} of task.{held_out}"
        return f"Row {index - self.held_out} of task.{trained}"

    def rendered(self, index: int) -> list[str] | None:
        """Return the texts of a row that has them in place of a conversation."""
        return self._rows[index].get(RENDERED)

    def question(self, index: int) -> Question:
        """Return what comes before the last answer. Raises ConfigError for a row without messages."""
        if self.rendered(index):
            raise ConfigError("task.kind", self._config.kind, f"Row {index} has no messages, but texts for mode=sft.")
        messages, tools = self.conversation(index)
        return {"messages": messages[:-1], "tools": tools, "answer": messages[-1].get("content")}

    def digest(self) -> str:
        """Return the digest of all rows, as one list in JSON."""
        found = hashlib.sha256(b"[")
        for number in range(self.size):
            found.update((b"," if number else b"") + msgspec.json.encode(self._rows[number]))
        found.update(b"]")
        return found.hexdigest()


def _check_rendered(texts: Any, where: str) -> None:
    """Raise ConfigError unless these are contexts and trained texts, alternately."""
    good = isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)
    if not good or not texts or len(texts) % 2:
        remedy = f"{where} has {texts!r:.80}: it must be a list of context and trained text, alternately."
        raise ConfigError("task.train_file", RENDERED, remedy)


def _called(message: Message) -> list[str] | None:
    """Return the names of the functions that a message calls; None if its tool_calls have another form."""
    try:
        return [str((call.get("function") or call)["name"]) for call in message.get("tool_calls") or []]
    except (AttributeError, KeyError, TypeError):
        return None


class Part(msgspec.Struct, array_like=True):
    """A trained text and what comes before it, as tokens. `begins`: the context starts anew with it."""

    observation: list[int]
    written: list[int]
    begins: bool


class Trained:
    """The tokens of conversations, with the chat template of one model."""

    def __init__(self, model: Path, config: Config) -> None:
        """`model` is its folder."""
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(model, config.model.chat_template)
        self._template, self._params = config.model.chat_template, config.model.chat_template_kwargs
        self._key = config.task.prompt_key
        self._marked = bool(MARKS.search(str(self._tokenizer.chat_template)))
        ends = self._tokenizer.convert_ids_to_tokens(stop_tokens(model, self._tokenizer))
        self._end = re.compile("|".join(re.escape(str(end)) for end in ends))

    def parts(self, messages: Sequence[Message], tools: Sequence[Message], where: str) -> list[Part]:
        """Return a part for each message of the assistant. Raises ConfigError if the template does not render it, or
        changes its text."""
        if self._marked:
            return self._of_marks(messages, tools, where)
        found: list[Part] = []
        before = ""
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            context, written = self._rendered(messages[: place + 1], tools, where)
            follows = bool(found) and context.startswith(before)
            observation = self._encode(context[len(before) :] if follows else context)
            found.append(Part(observation, self._spelled(written, where), not follows))
            before = context + written
        return found

    def of_rendered(self, texts: Sequence[str], where: str) -> list[Part]:
        """Return the parts of context and trained text, alternately. Raises ConfigError."""
        pairs = enumerate(zip(texts[::2], texts[1::2], strict=True))
        return [
            Part(self._encode(context), self._spelled(written, where), not place) for place, (context, written) in pairs
        ]

    def _of_marks(self, messages: Sequence[Message], tools: Sequence[Message], where: str) -> list[Part]:
        """Return the parts of a conversation whose template marks what is trained, by transformers' own mask."""
        found = self._applied(messages, tools, where, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = found["input_ids"], found["assistant_masks"]
        spans = [[ids[place] for place in own] for _, own in groupby(range(len(ids)), key=mask.__getitem__)]
        if not any(mask) or mask[0]:
            raise self._refused(where, "marks nothing as generated, or all from the first token on: set another")
        pairs = zip(spans[::2], spans[1::2], strict=False)  # what follows the last answer is no context of any
        return [Part(context, written, not place) for place, (context, written) in enumerate(pairs)]

    def _spelled(self, written: str, where: str) -> list[int]:
        """Return the tokens of a trained text. Raises ConfigError if they do not spell it."""
        ids = self._encode(written)
        if self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) != written:
            remedy = f"{where}: the model's tokens do not spell {written!r:.80}: correct the row."
            raise ConfigError("task.prompt_key", self._key, remedy)
        return ids

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Message], where: str) -> tuple[str, str]:
        """Return what the template puts before the last message's text, and this text with what ends it."""
        context = self._text(messages[:-1], tools, where, begin=True)
        whole = self._text(messages, tools, where, begin=False)
        content = str(messages[-1].get("content") or "").strip()
        if begun := LAST_TAG.search(context):  # a model that always thinks does not write <think> itself
            content = content.removeprefix(begun[1]).strip()
        calls = _called(messages[-1]) or []
        end = self._end.search(whole, len(context))
        spelled = whole[len(context) : end.start() if end else len(context)].strip()
        kept = content in spelled if calls else spelled.endswith(content)
        if not whole.startswith(context) or not end:
            problem = (
                "does not put the assistant's message behind its generation prompt, and the end of an answer behind it"
            )
        elif inside := self._end.search(json.dumps(messages[-1], ensure_ascii=False, default=str)):
            problem = f"renders a message that holds the token which ends an answer ({inside[0]})"
        elif not kept or not all(name in spelled.replace(content, "", 1) for name in calls):
            problem = f"renders {' '.join([content, *calls]).strip()!r:.60} as {spelled!r:.60}"
        else:
            return context, whole[len(context) : end.end()]
        raise self._refused(where, f"{problem}: correct the row, or set one that marks answers with {{% generation %}}")

    def _refused(self, where: str, problem: str) -> ConfigError:
        return ConfigError("model.chat_template", self._template, f"{where}: the chat template {problem}.")

    def _text(self, messages: Sequence[Message], tools: Sequence[Message], where: str, *, begin: bool) -> str:
        how = {"add_generation_prompt": begin, "tokenize": False, "return_dict": False}
        return str(self._applied(messages, tools, where, **how))

    def _applied(self, messages: Sequence[Message], tools: Sequence[Message], where: str, **how: Any) -> Any:
        """Return what the chat template makes of messages. Raises ConfigError if it rejects them."""
        try:
            return self._tokenizer.apply_chat_template(list(messages), tools=list(tools) or None, **how, **self._params)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._refused(where, f"rejects its messages ({error}): correct the row") from None

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def trajectory_of(parts: Sequence[Part], version: int) -> Trajectory:
    """Return an episode with these parts, as if this version had written them, so that they are not stale."""
    turns = []
    for number, part in enumerate(parts):
        count = len(part.written)
        completion = Completion(part.written, [0.0] * count, [VersionSpan(version, 0, count)], "stop")
        observation = part.observation if number else []  # the first is the prompt of the group
        turns.append(Turn(observation, completion, begins=part.begins and number > 0))
    return Trajectory(turns, 0.0)
