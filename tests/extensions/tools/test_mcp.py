"""Servers that answer, refuse, hang, die and talk nonsense: each call has its outcome, and no process is left."""

from __future__ import annotations

import asyncio
import os
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.tools import connection as connections
from asyncrl.extensions.tools import stdio
from asyncrl.extensions.tools.connection import Connection
from asyncrl.extensions.tools.mcp_tools import McpServers, McpSpec, ask, connection
from asyncrl.extensions.tools.servers import Starter
from asyncrl.extensions.tools.tool import Tool, ToolError
from asyncrl.launch.leftovers import carrying
from tests.extensions.tools.waits import eventually

SERVER = str(Path(__file__).parent / "server.py")
MARK = f"ASYNCRL_RUN_ID=mcp-{os.getpid()}"


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every server, and what it has started, is gone at the end."""
    monkeypatch.setenv(*MARK.split("="))
    monkeypatch.setattr(stdio, "GRACE_SECONDS", 0.2)
    yield
    assert left() == []


def left() -> list[int]:
    """Processes that are there and stay: a signal takes its time."""
    deadline = time.monotonic() + 60
    while (found := carrying(MARK.encode())) and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def spec(*words: str, **options: Any) -> McpSpec:
    return McpSpec(use="mcp", command=["python", SERVER, *words], **options)


def run(script: Callable[..., Awaitable[Any]], *words: str, **options: Any) -> Any:
    """The script with the tools of an episode, by name, or with the servers."""

    async def main() -> Any:
        servers = McpServers(spec(*words, **options))
        try:
            async with asyncio.timeout(240):
                return await script(servers)
        finally:
            await servers.close()
            assert len(asyncio.all_tasks()) == 1

    return asyncio.run(main())


async def opened(servers: McpServers) -> dict[str, Any]:
    tools = {tool.name: tool for tool in await servers.episode("tools.0")}
    for tool in tools.values():
        await tool.open()  # type: ignore[attr-defined]
    return tools


async def closed(tools: dict[str, Any]) -> None:
    for tool in tools.values():
        await tool.close()


def test_concurrent_calls_of_a_server_get_their_answers() -> None:
    async def script(servers: McpServers) -> list[str]:
        tools = await opened(servers)
        return await asyncio.gather(*(tools["echo"].call({"text": str(n)}) for n in range(50)))

    assert run(script) == [str(n) for n in range(50)]


def test_images_of_a_server_are_parts_beside_its_text() -> None:
    async def script(servers: McpServers) -> Any:
        return await (await opened(servers))["shot"].call({})

    image = {"type": "image", "image": "data:image/png;base64,cG5n"}
    assert run(script) == [{"type": "text", "text": "here"}, image]


def test_listed_tool_is_what_the_server_says_and_only_takes_some() -> None:
    async def script() -> Any:
        (tool,) = await ask(spec(only=["echo"]), "tools.0")
        with pytest.raises(ConfigError, match=r"tools.0.only: got \['nope'\]. The tools of .* are big, count, die"):
            await ask(spec(only=["nope"]), "tools.0")
        return tool

    found = asyncio.run(script())
    assert (found.name, found.input_schema["required"]) == ("echo", ["text"])


@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        ("fail", {"text": "no such city"}, "no such city"),
        ("invalid", {}, "not like that"),
        ("big", {"size": 6_000_000}, "the answer is larger than 4 MiB"),
    ],
)
def test_what_a_server_reports_is_for_the_model(tool: str, arguments: dict[str, Any], told: str) -> None:
    async def script(servers: McpServers) -> str:
        tools = await opened(servers)
        with pytest.raises(ToolError, match=told):
            await tools[tool].call(arguments)
        return await tools["echo"].call({"text": "still there"})

    assert run(script) == "still there"


@pytest.mark.parametrize(
    ("tool", "detail"),
    [
        ("die", "is gone: it closed the connection, it exited with status 1; its last output:\na last word"),
        ("nonsense", "sent an invalid answer"),
        ("internal", "failed: out of order"),
    ],
)
def test_server_that_fails_is_typed_and_serves_the_next_call(tool: str, detail: str) -> None:
    async def script(servers: McpServers) -> str:
        tools = await opened(servers)
        with pytest.raises(EpisodeFailed) as caught:
            await tools[tool].call({})
        assert (caught.value.reason, caught.value.retry) == ("tool", True)
        assert detail in caught.value.detail
        return await tools["echo"].call({"text": "again"})

    assert run(script) == "again"


def test_calls_in_flight_fail_with_the_server_that_dies() -> None:
    async def script(servers: McpServers) -> list[Any]:
        tools = await opened(servers)
        hanging = [asyncio.create_task(tools["hang"].call({})) for _ in range(3)]
        await tools["echo"].call({"text": "the others were sent"})
        with pytest.raises(EpisodeFailed):
            await tools["die"].call({})
        return await asyncio.gather(*hanging, return_exceptions=True)

    for error in run(script):
        assert isinstance(error, EpisodeFailed)
        assert "it exited with status 1" in error.detail


def test_lines_that_are_no_messages_are_passed_over() -> None:
    async def script(servers: McpServers) -> str:
        return await (await opened(servers))["garbage"].call({})

    assert run(script) == "here"


def test_call_that_is_given_up_leaves_the_others() -> None:
    async def script(servers: McpServers) -> str:
        tools = await opened(servers)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tools["hang"].call({}), 0.05)
        return await tools["echo"].call({"text": "here"})

    assert run(script) == "here"


def test_silent_server_is_ended_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.2)

    async def script(servers: McpServers) -> str:
        tools = await opened(servers)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tools["stall"].call({}), 1.0)  # it was sent
        with pytest.raises(EpisodeFailed, match=r"is gone: it no longer answers \(TimeoutError"):
            await tools["echo"].call({"text": "into the void"})
        return await tools["echo"].call({"text": "again"})

    assert run(script) == "again"


def test_message_of_any_length_is_passed_over_in_bounded_memory() -> None:
    """The caller is told if the message begins with its number; otherwise the call has its time limit."""
    size, said = stdio.MOST_BYTES, stdio.ServerOutput()

    class Stream:
        def __init__(self, *pieces: bytes) -> None:
            self._pieces = iter(pieces)

        async def read(self, size: int) -> bytes:
            return next(self._pieces, b"")

    async def lines(*pieces: bytes) -> list[bytes]:
        return [line async for line in stdio._lines(Stream(*pieces))]  # type: ignore[arg-type]

    head, piece = b'{"jsonrpc": "2.0", "id": 7, "result": "', b"x" * (1 << 16)
    tracemalloc.start()
    long, after = asyncio.run(lines(head, *[piece] * 1000, b'"}\nafter\nrest'))  # 62 MiB
    assert tracemalloc.get_traced_memory()[1] < 4 * size
    tracemalloc.stop()
    assert after == b"after"
    assert len(long) < 2 * size
    message: Any = stdio._message(long, said)
    assert (message.message.id, message.message.error.message) == (7, stdio.TOO_LARGE)
    assert stdio._message(b'{"result": {"id": 7, "x": "' + b"x" * size, said) is None
    assert said.text == f"[a message of more than {size} bytes]\n"


@pytest.mark.integration
def test_hundred_megabytes_are_told_as_too_large() -> None:
    async def script(servers: McpServers) -> str:
        tools = await opened(servers)
        with pytest.raises(ToolError, match="larger than 4 MiB"):
            await tools["big"].call({"size": 100_000_000})
        return await tools["echo"].call({"text": "here"})

    assert run(script) == "here"


# --- one for all, or one for each -----------------------------------------------------------------------------


def test_shared_server_is_started_once_for_all() -> None:
    async def script(servers: McpServers) -> list[str]:
        episodes = await asyncio.gather(*(opened(servers) for _ in range(5)))
        pids = {(await tools["pid"].call({})).split()[0] for tools in episodes}
        assert len(pids) == 1
        await asyncio.gather(*(closed(tools) for tools in episodes))
        return await (await opened(servers))["echo"].call({"text": "not closed with an episode"})

    assert run(script) == "not closed with an episode"


@pytest.mark.parametrize("warm", [0, 2])
def test_server_of_an_episode_is_its_own_and_ends_with_it(warm: int) -> None:
    async def script(servers: McpServers) -> None:
        first, second = await opened(servers), await opened(servers)
        assert [await tools["count"].call({}) for tools in (first, first, second)] == ["1", "2", "1"]
        pid, child = (await first["pid"].call({})).split()
        await closed(first)
        await eventually(lambda: not {int(pid), int(child)} & set(carrying(MARK.encode())))
        assert await second["count"].call({}) == "2"

    run(script, per_episode=True, warm=warm)


def test_warm_server_that_died_is_not_given_to_an_episode() -> None:
    async def script(servers: McpServers) -> str:
        await closed(await opened(servers))
        pool: Any = servers._servers
        await asyncio.gather(*pool._filling)
        await pool._ready[0].end("it died")
        return await (await opened(servers))["echo"].call({"text": "here"})

    assert run(script, per_episode=True, warm=1) == "here"


def test_episode_whose_own_server_dies_is_lost() -> None:
    async def script(servers: McpServers) -> None:
        tools = await opened(servers)
        for _ in range(2):
            with pytest.raises(EpisodeFailed, match="it exited with status 1"):
                await tools["die"].call({})

    run(script, per_episode=True)


def test_failing_server_is_tried_anew_within_bounds(tmp_path: Path) -> None:
    starts: list[int] = []

    def connect() -> Connection:
        starts.append(1)
        return connection(spec("--once", str(tmp_path / "marker")))

    async def main() -> None:
        (tmp_path / "marker").touch()
        starter = Starter("s", connect, start_timeout=30.0, restarts=2, delay=0.001)
        with pytest.raises(EpisodeFailed, match=r"is gone: .*it exited with status 1; its last output:\nalready"):
            await starter.start()
        assert len(starts) == 3
        (tmp_path / "marker").unlink()
        await (await starter.start()).end("seen")

    asyncio.run(main())


def test_program_that_cannot_be_started_is_not_tried_again() -> None:
    tried: list[int] = []

    def connect() -> Connection:
        tried.append(1)
        return connection(McpSpec(use="mcp", command=["no-such-program"]))

    async def main() -> None:
        with pytest.raises(EpisodeFailed, match="no-such-program cannot be started"):
            await Starter("s", connect, start_timeout=30.0, restarts=2, delay=60.0).start()

    asyncio.run(main())
    assert len(tried) == 1


def test_silent_server_is_given_up_and_its_process_ended() -> None:
    async def main() -> None:
        with pytest.raises(EpisodeFailed, match=r"it did not start within 0.3 s, it was killed by SIGKILL"):
            await connection(spec("--silent")).start(0.3)

    asyncio.run(main())


def test_program_that_is_none_is_refused_by_its_field() -> None:
    async def main() -> None:
        missing = McpSpec(use="mcp", command=["no-such-program"])
        with pytest.raises(
            ConfigError, match=r"tools.0: got 'no-such-program'. Its tools could not be listed: .* cannot be start"
        ):
            await ask(missing, "tools.0")

    asyncio.run(main())


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 20, 100])
def test_start_that_is_cancelled_leaves_no_process(turns: int) -> None:
    async def main() -> None:
        session = connection(spec("--silent"))
        starting = asyncio.create_task(session.start(30.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        await session.end("it is not wanted")

    asyncio.run(main())


def test_loop_that_ends_first_takes_its_servers_along() -> None:
    """Nobody has closed them."""

    async def main() -> str:
        tools: list[Tool] = list(await McpServers(spec(only=["pid"])).episode("tools.0"))
        await tools[0].open()  # type: ignore[attr-defined]
        return await tools[0].call({})

    assert asyncio.run(main())


def test_secrets_reach_a_server_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_KEY", "secret")
    given = spec(env={"KEY": "$ASYNCRL_TEST_KEY", "MODE": "fast"})
    given.check("tools.0")
    with pytest.raises(
        ConfigError, match=r"tools.0.env.KEY: got '\$NO_SUCH_KEY'. This environment variable is not set"
    ):
        spec(env={"KEY": "$NO_SUCH_KEY"}).check("tools.0")
    seen: dict[str, str] = {}

    def look(command: Any, env: dict[str, str], *rest: Any) -> Any:
        seen.update(env)
        raise EpisodeFailed("tool", "seen", retry=False)

    monkeypatch.setattr("asyncrl.extensions.tools.mcp_tools.stdio", look)

    async def main() -> None:
        with pytest.raises(EpisodeFailed, match="seen"):
            await connection(given).start(30.0)

    asyncio.run(main())
    assert (seen["KEY"], seen["MODE"]) == ("secret", "fast")
    assert "ASYNCRL_TEST_KEY" not in seen
    assert "PATH" in seen
