"""A call that came to nothing is told from a text that means none, in every format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.extensions.tools.calls import malformed_calls, parse

FORMATS = ("hermes", "llama3_json", "pythonic")


@pytest.mark.parametrize(
    ("format", "text", "count"),
    [
        ("hermes", "The answer is {7}.", 0),
        ("hermes", "<tool_call>add(1)</tool_call> and <tool_call>{", 2),
        ("llama3_json", '{"answer": 7}', 0),
        ("llama3_json", "[7]", 0),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1}', 1),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": 1}', 1),
        ("pythonic", "[7]", 0),
        ("pythonic", "See [the page](link).", 0),
        ("pythonic", "[add(1)]", 1),
        ("pythonic", "[add(a=1", 1),
    ],
)
def test_what_was_meant_as_a_call_is_told(format: str, text: str, count: int) -> None:
    rest, calls = parse(text, format)
    assert calls == []
    assert len(malformed_calls(rest, format)) == count


pieces = st.sampled_from(
    [*'<>{}[]();:,"=\\ a1', "<tool_call>", "</tool_call>", '{"name": "a", "arguments": {', "[add("]
)


@pytest.mark.parametrize("format", FORMATS)
@given(text=st.lists(pieces).map("".join))
def test_no_text_makes_it_raise(format: str, text: str) -> None:
    assert all(slip.startswith("The call is not") for slip in malformed_calls(text, format))
