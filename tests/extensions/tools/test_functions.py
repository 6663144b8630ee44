"""A plain function is a tool: the model is told its signature, and it runs where it stops nobody."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from asyncrl.errors import AsyncRLError, EpisodeFailed
from asyncrl.extensions.tools import threads
from asyncrl.extensions.tools.functions import FunctionTool, documented
from tests.extensions.tools.waits import eventually


@dataclass
class Place:
    x: int
    y: float = 0.0


def forecast(
    city: str, days: int = 1, unit: Literal["c", "f"] = "c", title: list[int] | None = None, at: Place | None = None
) -> Any:
    """The forecast for a city.

    It is made up.

    Args:
        city: its name,
            in English
        days (int): how many: at most 7
        unit: of temperatures

    Returns:
        title: of no argument
    """
    return {"city": city, "days": days, "title": title, "at": repr(at)}


def test_signature_and_docstring_are_what_the_model_is_told() -> None:
    tool = FunctionTool(forecast)
    assert (tool.name, tool.description) == ("forecast", "The forecast for a city.\n\nIt is made up.")
    properties = tool.parameters["properties"]
    assert properties["city"] == {"type": "string", "description": "its name, in English"}
    assert properties["days"] == {"type": "integer", "default": 1, "description": "how many: at most 7"}
    assert properties["unit"]["enum"] == ["c", "f"]
    assert "description" not in properties["title"]
    assert properties["title"]["anyOf"][0] == {"type": "array", "items": {"type": "integer"}}
    assert tool.parameters["required"] == ["city"]
    assert tool.parameters["additionalProperties"] is False


def test_arguments_follow_the_signature_and_results_are_text() -> None:
    found = asyncio.run(FunctionTool(forecast).call({"city": "Köln", "at": {"x": 1}}))
    assert found == '{"city": "Köln", "days": 1, "title": null, "at": "Place(x=1, y=0.0)"}'


def test_docstring_without_arguments_is_a_description() -> None:
    assert documented("Adds.\n\nNote: at once.") == ("Adds.\n\nNote: at once.", {})
    assert documented("") == ("", {})


def positional(a: int, /) -> None: ...
def many(*a: int) -> None: ...
def named(**a: int) -> None: ...
def strange(a: threading.Thread) -> None: ...


@pytest.mark.parametrize("function", [positional, many, named, strange])
def test_function_that_json_cannot_call_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=function.__name__):
        FunctionTool(function)


def test_plain_function_does_not_stop_the_loop() -> None:
    released = threading.Event()

    def wait() -> str:
        assert released.wait(30)
        return threading.current_thread().name

    async def release() -> str:
        released.set()
        return threading.current_thread().name

    async def main() -> list[str]:
        return await asyncio.gather(FunctionTool(wait).call({}), FunctionTool(release).call({}))

    assert asyncio.run(main()) == ["tool wait", "MainThread"]


def test_what_a_plain_function_raises_comes_with_its_cause() -> None:
    def broken() -> str:
        raise OSError("no network")

    with pytest.raises(EpisodeFailed, match="tool: OSError: no network") as caught:
        asyncio.run(FunctionTool(broken).call({}))
    assert isinstance(caught.value.__cause__, OSError)


def test_hanging_threads_are_counted_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "MOST_HANGING", 2)
    released = threading.Event()

    def hang() -> str:
        assert released.wait(30)
        return "late"

    async def main() -> None:
        tool = FunctionTool(hang)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(tool.call({}), 0.01)
        with pytest.raises(AsyncRLError, match="2 calls of the tool hang have not returned"):
            await tool.call({})
        released.set()
        await eventually(lambda: not tool._threads.hanging)
        assert await tool.call({}) == "late"

    asyncio.run(main())
