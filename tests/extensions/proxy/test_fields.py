"""The proxy refuses fields that would change the sampling distribution, with the field, its value and the remedy."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.extensions.proxy.fields import RequestOptions, read
from asyncrl.extensions.proxy.messages import ApiError

TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED: list[tuple[str, Any]] = [
    ("temperature", 0.7),
    ("temperature", 0),
    ("top_p", 0.9),
    ("top_k", 40),
    ("min_p", 0.1),
    ("frequency_penalty", 0.1),
    ("presence_penalty", -0.1),
    ("repetition_penalty", 1.1),
    ("logit_bias", {"1": 5}),
    ("response_format", {"type": "json_object"}),
    ("parallel_tool_calls", False),
    ("top_logprobs", 2),
    ("stop", ["<eos>", 7]),
    ("stop", 7),
    ("guided_json", {}),
    ("reasoning_effort", "low"),
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_completion_tokens", "5"),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("stream", "yes"),
    ("stream_options", []),
    ("model", 1),
    ("logprobs", 1),
    ("return_token_ids", 1),
]


def of(route: Any = "chat", **body: Any) -> RequestOptions:
    return read(body, route, temperature=1.0, end="<eos>")


@pytest.mark.parametrize(("field", "value"), REFUSED)
def test_refusal_names_the_field_the_value_and_the_remedy(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        of(**{field: value})
    error = refused.value.body()["error"]
    assert (refused.value.status, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field}: got {value!r}. ")
    assert error["message"].split(". ", 1)[1].startswith(("Remove it", "Must be"))


@pytest.mark.parametrize("field", [field for field, _ in REFUSED])
def test_null_is_as_good_as_absent(field: str) -> None:
    assert of(**{field: None}) == of()


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "logit_bias": {}, "frequency_penalty": 0.0},
        {"response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True, "top_logprobs": 0},
        {"stop": "<eos>", "seed": 7, "user": "u", "metadata": {"a": "b"}, "store": False},
        {"stop": ["<eos>"]},
        {"stop": []},
    ],
)
def test_what_changes_nothing_is_taken(body: dict[str, Any]) -> None:
    assert of(**body) == of()


def test_stop_strings_cut_at_the_first_of_them() -> None:
    wanted = of(stop=["<eos>", ".", "b"], tool_choice="required")
    assert wanted.stop == (".", "b")
    assert [wanted.cut(text) for text in ("ab.", "a.b", "a")] == [("a", "b"), ("a", "."), ("a", None)]


def test_temperature_is_the_runs() -> None:
    assert read({"temperature": 0.5}, "chat", temperature=0.5, end="") == of()
    with pytest.raises(ApiError, match=r"temperature: got 1\.0\. Remove it, or train at it: .* is 0\.5"):
        read({"temperature": 1.0}, "chat", temperature=0.5, end="")


def test_answer_is_wanted_as_the_request_says() -> None:
    body = {"model": "m", "max_tokens": 5, "max_completion_tokens": 3, "n": 2, "stream": True, "logprobs": True}
    wanted = of(**body, stream_options={"include_usage": True}, return_token_ids=True)
    assert wanted == RequestOptions("m", 3, 2, stream=True, usage=True, logprobs=True, token_ids=True)
    assert of() == RequestOptions("policy", None, 1, stream=False, usage=False, logprobs=False, token_ids=False)


def test_each_route_has_fields_of_its_own() -> None:
    assert of("text", prompt="1", logprobs=0).logprobs
    assert not of("text", prompt="1").logprobs
    for route, body in (("text", {"messages": []}), ("chat", {"prompt": "1"}), ("text", {"logprobs": 1})):
        with pytest.raises(ApiError):
            of(route, **body)


def test_long_value_is_told_in_part() -> None:
    with pytest.raises(ApiError, match=r"guided_regex: got 'a{199}\.\.\.\. Remove it"):
        of(guided_regex="a" * 100_000)
