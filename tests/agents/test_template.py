"""Incremental templating: what a chat template makes of a whole chat, without tokenising anything twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from asyncrl.agents.template import ChatTemplate
from asyncrl.errors import ConfigError
from asyncrl.models import tiny
from asyncrl.rollout.parts import load_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<bos>' + message['role'] + ' ' + message['content'] + '<eos>' + ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<bos>assistant ' }}{% endif %}"
)
# What Qwen3's does: thoughts are shown in the last answer alone.
FORGETFUL = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '=' + (('0' + message['content']) if loop.last else message['content']) + '<eos>' }}"
    "{% else %}{{ '<bos>' + message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '=' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.write(folder)
    return load_tokenizer(folder, None)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("chat_template", [None, CHATML])
def test_extended_chat_is_the_chat_that_is_rendered_at_once(tokenizer: Any, chat_template: str | None) -> None:
    kept, tokenizer.chat_template = tokenizer.chat_template, chat_template or tokenizer.chat_template
    template = ChatTemplate(tokenizer)
    ids = template.begin([user("12")])
    for answer, said in (("3 4", "5"), ("", "6 7")):
        ids += [*tokenizer.encode(answer, add_special_tokens=False), 10]
        ids += template.extend([user(said)], last=ids[-1])
    whole = template.begin([user("12"), assistant("3 4"), user("5"), assistant(""), user("6 7")])
    tokenizer.chat_template = kept
    assert ids == whole


def test_end_that_the_model_did_not_write_is_put_in(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    assert template.extend([user("5")], last=10) == [5, 11]
    assert template.extend([user("5")], last=3) == [10, 5, 11]
    assert template.extend([user("5")], last=None) == [10, 5, 11]


def test_rewriting_template_does_not_rewrite_what_was_written(tokenizer: Any) -> None:
    kept, tokenizer.chat_template = tokenizer.chat_template, FORGETFUL
    found = ChatTemplate(tokenizer).extend([user("5")], last=10)
    tokenizer.chat_template = kept
    assert found == [12, 5, 11]


def test_template_that_hides_answers_allows_no_second_turn(tokenizer: Any) -> None:
    kept, tokenizer.chat_template = tokenizer.chat_template, "{{ '<bos>' }}"
    with pytest.raises(ValueError, match="does not render the assistant's messages"):
        ChatTemplate(tokenizer).extend([user("5")], last=10)
    tokenizer.chat_template = kept


def test_tools_stand_where_the_template_puts_them(tokenizer: Any) -> None:
    kept = tokenizer.chat_template
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}" + kept
    found = ChatTemplate(tokenizer).begin([user("1")], [{"type": "function", "function": {"name": "77"}}])
    tokenizer.chat_template = kept
    assert found == [7, 7, 12, 1, 11]


def test_template_variables_are_set_in_every_turn_or_refused(tokenizer: Any) -> None:
    kept = tokenizer.chat_template
    tokenizer.chat_template = kept + "{% if enable_thinking %}77{% endif %}"
    thinks, silent = (ChatTemplate(tokenizer, {"enable_thinking": on}) for on in (True, False))
    with pytest.raises(ConfigError, match=r"model.chat_template_kwargs.enable_thinkin: got .* does not mention it"):
        ChatTemplate(tokenizer, {"enable_thinkin": True})
    found = [(one.begin([user("1")]), one.extend([user("5")], last=10)) for one in (thinks, silent)]
    tokenizer.chat_template = kept
    assert found[0] == tuple([*ids, 7, 7] for ids in found[1])
    assert found[1][0] == ChatTemplate(tokenizer).begin([user("1")])


def test_text_beginning_a_context_gets_one_beginning_token(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    assert (template.encode("12"), template.encode("12", begins=True)) == ([1, 2], [1, 2])  # its tokenizer adds nothing
    assert (template.end, template.encode(template.end)) == ("<eos>", [10])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 12)])
    try:
        assert (template.encode("12"), template.encode("12", begins=True)) == ([1, 2], [12, 1, 2])
        assert template.encode("<bos>12", begins=True) == [12, 1, 2]
    finally:
        tokenizer.backend_tokenizer.post_processor = None
