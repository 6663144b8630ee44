"""Calls are run and reported, errors of the model too; faults of others never become a reward."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from asyncrl.envs.env import EnvSpec, Step
from asyncrl.envs.pool import EnvironmentPool, PoolSettings
from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.tools import schemas
from asyncrl.extensions.tools.calls import MOST_NESTED
from asyncrl.extensions.tools.env import ToolEnv
from asyncrl.extensions.tools.functions import FunctionTool
from asyncrl.extensions.tools.threads import ThreadRunner
from asyncrl.extensions.tools.tool import ToolError
from asyncrl.observability.intervals import AGENT, CURRENT, ENVIRONMENT, TOOL, Activity, Interval
from tests.extensions.tools.scripts import run

Act = Callable[[dict[str, Any]], Awaitable[str]]


class Acts:
    """A tool of any arguments."""

    description = ""

    def __init__(self, name: str, act: Act, *, parameters: Any = None, **more: Any) -> None:
        self.name, self.call, self.parameters = name, act, parameters or {"type": "object"}
        vars(self).update(more)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


async def echo(arguments: dict[str, Any]) -> str:
    return str(arguments.get("text"))


def step(text: str, *tools: Any, **options: Any) -> Step:
    return run(lambda: ToolEnv(tools or [FunctionTool(add)], **options).step(text))


def told(*args: Any, **options: Any) -> list[str]:
    return [message["content"] for message in step(*args, **options).messages]  # type: ignore[index]


def raising(error: BaseException) -> Any:
    async def act(arguments: dict[str, Any]) -> str:
        raise error

    return Acts("t", act)


async def hang(arguments: dict[str, Any]) -> str:
    await asyncio.Event().wait()
    return ""


def test_calls_are_answered_in_their_order() -> None:
    found = step(f"Let me see. {called('add', a=1, b=2)} and {called('add', b=5, a=6)}")
    assert found.messages == [
        {"role": "tool", "tool_call_id": "call00000", "name": "add", "content": "3"},
        {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "11"},
    ]
    assert (found.done, found.score, found.reward) == (False, True, 0.0)


def test_turn_without_a_call_is_the_end_and_the_task_scores_it() -> None:
    assert step("It is 3.") == Step(done=True, score=True)


def test_calls_are_numbered_through_the_episode() -> None:
    async def script() -> list[str]:
        env = ToolEnv([FunctionTool(add)])
        steps = [await env.step(called("add", a=1, b=1) * 2) for _ in range(2)]
        return [message["tool_call_id"] for one in steps for message in one.messages]  # type: ignore[index]

    assert run(script) == [f"call0000{n}" for n in range(4)]


# --- the policy's faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>{</tool_call>", "Error: The call is not JSON of the form"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "Error: The call is not JSON of the form"),
        ('<tool_call>{"name": "add"', "Error: The call is not JSON"),
        ('<tool_call>{"name": "add", "arguments": 1}</tool_call>', "Error: The call is not of the form"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>', "Error: The call is not of the form"),
        (called("sub", a=1), "Error: there is no tool 'sub'; there are: add."),
        (called("add", a=1), "Error: arguments: 'b' is a required property. The schema is {"),
        (called("add", a=1, b=2, c=3), "Error: arguments: Additional properties are not allowed"),
        (called("add", a=1, b="2"), "Error: argument b: '2' is not of type 'integer'"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_and_costs_the_penalty(text: str, expected: str) -> None:
    found = step(f"{text}", penalty=0.25)
    (message,) = found.messages
    assert message["content"].startswith(expected)  # type: ignore[index]
    assert (message["role"], found.done, found.reward) == ("tool", False, -0.25)  # type: ignore[index]


def test_good_calls_beside_a_wrong_one_are_run() -> None:
    found = step(f"{called('add', a=1, b=2)}<tool_call>{{</tool_call>{called('nope')}", penalty=0.25)
    contents = [message["content"][:9] for message in found.messages]  # type: ignore[index]
    assert (contents, found.reward) == (["3", "Error: th", "Error: Th"], -0.5)


def test_each_turn_pays_for_its_own_faults() -> None:
    async def script() -> list[float]:
        env = ToolEnv([FunctionTool(add)], penalty=1.0)
        return [(await env.step(text)).reward for text in (called("nope"), called("add", a=1, b=1))]

    assert run(script) == [-1.0, 0.0]


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 2):
        value = [value]
    return {"text": value}


def test_deep_arguments_reach_no_tool() -> None:
    tool = Acts("echo", echo)
    (called_it,) = told(called("echo", **nested(MOST_NESTED)), tool)
    assert called_it.startswith("[[")
    (refused,) = told(called("echo", **nested(MOST_NESTED + 1)), tool)
    assert refused == f"Error: the arguments are nested more than {MOST_NESTED} deep."


TAKES_LONG = "Error: checking the arguments took more than 2 s of CPU time: shorten them."


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        ({"pattern": "^(a+)+$"}, "a" * 40 + "b", TAKES_LONG),
        ({"uniqueItems": True}, [{"n": n} for n in range(6000)], TAKES_LONG),
        ({"multipleOf": 0.1}, int("7" * 400), "Error: arguments: a number is too large"),
        ({"pattern": "^a+$"}, "b", "Error: argument text: 'b' does not match '^a+$'. The schema is {"),
        ({"pattern": "^a+$"}, "a", "a"),
        ({"pattern": "^a+$"}, "b" * 100_000, "Error: argument text: 'bbb"),
    ],
    ids=["backtracks", "compares", "overflows", "differs", "fits", "long"],
)
def test_arguments_are_checked_in_bounded_time(schema: dict[str, Any], value: Any, expected: str) -> None:
    """The loop itself computes less than the check may take."""
    tool = Acts("echo", echo, parameters={"type": "object", "properties": {"text": schema}})

    async def script() -> list[str]:
        env, text, before = ToolEnv([tool]), called("echo", text=value), time.thread_time()
        outputs = [(await env.step(text)).messages[0]["content"] for _ in range(2)]  # type: ignore[index]
        assert time.thread_time() - before < schemas.CPU_SECONDS / 2
        return outputs

    assert [text[: len(expected)] for text in run(script)] == [expected] * 2


@pytest.mark.parametrize("schema", [{"pattern": "("}, {"$ref": "#"}], ids=["pattern", "circle"])
def test_schema_that_cannot_be_used_is_a_fault_of_the_tool(schema: dict[str, Any]) -> None:
    tool = Acts("echo", echo, parameters={"type": "object", "properties": {"text": schema}, **schema})
    with pytest.raises(EpisodeFailed, match="tool: the schema of echo cannot be used: ") as failed:
        step(called("echo", text="a"), tool)
    assert not failed.value.retry


def test_calls_beyond_the_limit_are_not_run() -> None:
    ran: list[int] = []

    async def count(arguments: dict[str, Any]) -> str:
        ran.append(1)
        return "ran"

    async def script() -> list[Step]:
        env = ToolEnv([Acts("t", count)], max_calls=3)
        return [await env.step(called("t") * 2 if n < 2 else called("t")) for n in range(3)]

    first, second, third = run(script)
    assert [message["content"] for message in second.messages] == [
        "ran",
        "Error: not run: the 3 calls that there are have been used up.",
    ]
    assert (first.done, second.done, third) == (False, False, Step(done=True, score=True))
    assert len(ran) == 3


def test_calls_that_are_none_use_the_limit_up_too() -> None:
    async def script() -> list[bool]:
        env = ToolEnv([], max_calls=2)
        return [(await env.step("<tool_call>{</tool_call>")).done for _ in range(3)]

    assert run(script) == [False, False, True]


# --- what tools report, and what they suffer ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "content"),
    [
        (ToolError("no such city"), "Error: no such city"),
        (ValueError("no such city"), "Error: ValueError: no such city"),
        (ZeroDivisionError("division by zero"), "Error: ZeroDivisionError: division by zero"),
        (KeyError("x"), "Error: KeyError: 'x'"),
    ],
)
def test_what_a_tool_reports_is_told_and_costs_nothing(error: Exception, content: str) -> None:
    found = step(called("t"), raising(error), penalty=1.0)
    assert ([message["content"] for message in found.messages], found.reward) == ([content], 0.0)  # type: ignore[index]


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("bug"), TimeoutError("its own"), EOFError("x")])
def test_crash_of_a_tool_is_no_reward_and_keeps_its_cause(error: Exception) -> None:
    with pytest.raises(EpisodeFailed, match=rf"tool: t: {type(error).__name__}: {error}") as caught:
        step(called("t"), raising(error))
    assert caught.value.__cause__ is error
    assert caught.value.retry is False  # a bug is one the next time too


@pytest.mark.parametrize("on_fault", ["episode", "model"])
def test_foreign_fault_keeps_its_reason_untold(on_fault: str) -> None:
    with pytest.raises(EpisodeFailed, match="sandbox: it is gone"):
        step(called("t"), raising(EpisodeFailed("sandbox", "it is gone")), on_fault=on_fault)


def test_hanging_tool_is_a_fault_and_ends_the_calls_beside_it() -> None:
    cancelled: list[str] = []

    async def other(arguments: dict[str, Any]) -> str:
        try:
            return await hang(arguments)
        except asyncio.CancelledError:
            cancelled.append("other")
            raise

    tools = [Acts("t", hang, timeout=0.05), Acts("other", other)]
    with pytest.raises(EpisodeFailed, match=r"tool: t did not answer within 0.05 s"):
        step(called("t") + called("other"), *tools)
    assert cancelled == ["other"]


@pytest.mark.parametrize("by_tool", [False, True])
def test_model_is_told_of_a_fault_where_said_so(by_tool: bool) -> None:
    options: dict[str, Any] = {} if by_tool else {"on_fault": "model"}
    tool = raising(OSError("gone"))
    slow = Acts("slow", hang, timeout=0.05)
    if by_tool:
        tool.on_fault = slow.on_fault = "model"
    found = told(called("t") + called("slow"), tool, slow, **options)
    assert found == ["Error: t: OSError: gone", "Error: slow did not answer within 0.05 s"]


def test_tool_may_insist_that_its_fault_is_the_episode_s() -> None:
    tool = raising(OSError("gone"))
    tool.on_fault = "episode"
    with pytest.raises(EpisodeFailed):
        step(called("t"), tool, on_fault="model")


def test_what_is_no_text_is_the_tool_s_fault() -> None:
    async def number(arguments: dict[str, Any]) -> Any:
        return 7

    with pytest.raises(EpisodeFailed, match="t returned int instead of a text or parts"):
        step(called("t"), Acts("t", number))


def shot(kind: str) -> Any:
    """Looks at something."""
    return {"one": b"png", "both": ["left", b"png", 7]}[kind]


def test_images_of_tools_are_parts_where_the_model_sees() -> None:
    image = {"type": "image", "image": b"png"}
    tool = FunctionTool(shot)
    assert told(called("shot", kind="one"), tool, images=True) == [[image]]
    both = [image, {"type": "text", "text": "left\n7"}]
    assert told(called("shot", kind="both"), tool, images=True) == [both]
    assert told(called("shot", kind="both"), tool) == ["left\n[image, which cannot be shown]\n7"]


def test_schema_referring_elsewhere_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[Any] = []
    monkeypatch.setattr("urllib.request.urlopen", fetched.append)
    tool = Acts("t", echo, parameters={"$ref": "http://127.0.0.1:1/schema.json"})
    with pytest.raises(
        EpisodeFailed,
        match=r"tool: the schema of t cannot be used: it has an unknown reference: .*127.0.0.1:1/schema.json",
    ):
        step(called("t"), tool)
    assert fetched == []


def test_hundred_megabytes_are_cut() -> None:
    async def big(arguments: dict[str, Any]) -> str:
        return "x" * 100_000_000

    (content,) = told(called("t"), Acts("t", big), output_chars=100)
    assert content == "x" * 100 + "\n[99999900 more characters are left out]"
    (content,) = told(called("add", a="y" * 1000, b=1), output_chars=100)
    assert len(content) < 150


# --- at once, and in order ------------------------------------------------------------------------------------


def test_calls_of_a_turn_run_at_once() -> None:
    async def script() -> Step:
        met = asyncio.Barrier(3)

        async def meet(arguments: dict[str, Any]) -> str:
            await met.wait()
            return "met"

        return await ToolEnv([Acts("t", meet)]).step(called("t") * 3)

    assert len(run(script).messages) == 3


def test_calls_in_order_wait_for_each_other() -> None:
    running: list[int] = []

    async def alone(arguments: dict[str, Any]) -> str:
        running.append(1)
        await asyncio.sleep(0)
        assert running.pop()
        assert not running
        return "alone"

    assert told(called("t") * 3, Acts("t", alone), parallel=False) == ["alone"] * 3


def test_cancelled_step_leaves_no_call_behind() -> None:
    ended: list[int] = []

    async def script() -> None:
        started = asyncio.Event()

        async def slow(arguments: dict[str, Any]) -> str:
            started.set()
            try:
                return await hang(arguments)
            finally:
                ended.append(1)

        stepping = asyncio.create_task(ToolEnv([Acts("t", slow)]).step(called("t") * 2))
        await started.wait()
        stepping.cancel()
        await asyncio.wait([stepping])
        assert stepping.cancelled()
        assert len(asyncio.all_tasks()) == 1

    run(script)
    assert ended == [1, 1]


# --- an episode -----------------------------------------------------------------------------------------------


class Opens(Acts):
    def __init__(self, name: str, seen: list[str], *, fails: bool = False) -> None:
        super().__init__(name, echo)
        self._seen, self._fails = seen, fails

    async def open(self) -> None:
        self._seen.append(f"open {self.name}")

    async def close(self) -> None:
        if self._fails:
            raise OSError("does not close")
        await asyncio.sleep(0)
        self._seen.append(f"close {self.name}")


def test_tools_are_all_closed_even_if_one_fails() -> None:
    seen: list[str] = []

    async def script() -> None:
        env = ToolEnv([Opens("a", seen, fails=True), Opens("b", seen), Acts("c", echo)])
        await env.reset({})
        with pytest.raises(OSError, match="does not close"):
            await env.close()

    run(script)
    assert seen == ["open a", "open b", "close b"]


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="several tools have the same name"):
        ToolEnv([Acts("a", echo), Acts("a", echo)])


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_whatever_ends_the_thread_of_a_tool_is_a_failure(error: type[BaseException]) -> None:
    """An error that ends the thread without a word would leave its caller waiting."""

    def raises() -> None:
        raise error

    with pytest.raises(EpisodeFailed, match=f"tool: {error.__name__}"):
        asyncio.run(asyncio.wait_for(ThreadRunner("t").call(raises), 10.0))


SEARCH = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'


class SearchOnce:
    """A tool that fails at its second call."""

    name, description = "search", "Searches."

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {"type": "object", "properties": {}}
        self.calls = 0

    async def call(self, arguments: dict[str, Any]) -> str:
        await asyncio.sleep(0.01)
        self.calls += 1
        if self.calls > 1:
            raise OSError("the index is down")
        return "found"


class Searching(ToolEnv):
    """An environment with this tool."""

    def __init__(self) -> None:
        super().__init__([SearchOnce()], on_fault="model")


def inside(inner: Interval, outer: Interval) -> bool:
    return outer.start <= inner.start <= inner.end <= outer.end


def test_tools_nest_and_faults_are_told_all_the_same() -> None:
    async def play() -> list[Interval]:
        activity = Activity()
        CURRENT.set(activity)
        pool = EnvironmentPool("shop", EnvSpec(f"{__name__}:Searching"), PoolSettings(concurrency=1))
        async with pool() as env:
            await env.reset({})  # type: ignore[misc]
            for _ in range(2):
                await asyncio.sleep(0.01)
                assert activity.waits_for == "its agent"
                await env.step(SEARCH)  # type: ignore[misc]
        activity.finish()
        await pool.close()
        return activity.intervals(time.time())

    every = asyncio.run(play())
    steps = [one for one in every if one.name in ("shop.step", "search")]
    assert [(one.phase, one.name) for one in steps] == [(ENVIRONMENT, "shop.step"), (TOOL, "search")] * 2
    assert inside(steps[1], steps[0])
    assert inside(steps[3], steps[2])
    *fine, failed = (one.outcome for one in steps)
    assert fine == [""] * 3
    assert failed.startswith("tool: OSError: the index is down (")  # and where
    agent = [one for one in every if one.phase == AGENT]
    assert all(any(one.end == step.start and one.seconds > 0.005 for one in agent) for step in (steps[0], steps[2]))
