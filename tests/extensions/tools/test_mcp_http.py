"""Servers over HTTP, as the mcp package makes them: what they answer, that it is too long, and that they go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.tools.mcp_tools import McpServers, McpSpec, ask
from asyncrl.extensions.tools.tool import ToolError
from asyncrl.network.ports import free_port
from tests.extensions.tools import server as raw
from tests.extensions.tools.waits import eventually

pytestmark = pytest.mark.integration


@asynccontextmanager
async def served(app: Any, port: int, lifespan: Any = "off") -> AsyncIterator[None]:
    serving = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan=lifespan))
    task = asyncio.create_task(serving.serve())
    await eventually(lambda: serving.started)
    try:
        yield
    finally:
        serving.should_exit = serving.force_exit = True
        await task


def app_of_the_package(**options: Any) -> Any:
    server = MCPServer("test", log_level="CRITICAL")

    @server.tool()
    async def echo(text: str) -> str:
        return text

    @server.tool()
    async def big(size: int) -> str:
        return "x" * size

    @server.tool()
    async def hang() -> str:
        await asyncio.Event().wait()
        return ""

    return server.streamable_http_app(**options)


async def streaming(scope: Any, receive: Any, send: Any) -> None:
    """The server of the other tests; it answers with events."""
    body = b""
    while scope["method"] == "POST":
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    request = json.loads(body) if body else {}
    if "id" not in request:
        await send({"type": "http.response.start", "status": 202 if body else 405, "headers": []})
        await send({"type": "http.response.body"})
        return
    answer = {"jsonrpc": "2.0", "id": request["id"], **raw.answer(request["method"], request.get("params", {}), 1)}
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": f"data: {json.dumps(answer)}\n\n".encode()})


@pytest.mark.parametrize("options", [{}, {"json_response": True}, {"stateless_http": True}])
def test_server_over_http_answers_hangs_goes_away_and_comes_back(options: dict[str, Any]) -> None:
    port = free_port("127.0.0.1")
    spec = McpSpec(use="mcp", url=f"http://127.0.0.1:{port}/mcp", restarts=0)

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"Its tools could not be listed: .* is gone: ConnectError"):
            await ask(spec, "tools.0")
        servers = McpServers(spec)
        async with asyncio.timeout(240):
            async with served(app_of_the_package(**options), port, "on"):
                tools: dict[str, Any] = {tool.name: tool for tool in await servers.episode("tools.0")}
                assert await tools["echo"].call({"text": "hi"}) == "hi"
                with pytest.raises(ToolError, match="larger than 4 MiB"):
                    await tools["big"].call({"size": 6_000_000})
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(tools["hang"].call({}), 0.1)
                assert await tools["echo"].call({"text": "still there"}) == "still there"
            with pytest.raises(EpisodeFailed, match="tool: the MCP server http"):
                await tools["echo"].call({"text": "into the void"})
            async with served(app_of_the_package(**options), port, "on"):
                assert await tools["echo"].call({"text": "again"}) == "again"
            await servers.close()

    asyncio.run(main())


def test_too_long_answer_is_told_also_as_an_event() -> None:
    port = free_port("127.0.0.1")

    async def main() -> None:
        servers = McpServers(McpSpec(use="mcp", url=f"http://127.0.0.1:{port}/"))
        async with asyncio.timeout(240), served(streaming, port):
            tools: dict[str, Any] = {tool.name: tool for tool in await servers.episode("tools.0")}
            with pytest.raises(ToolError, match="larger than 4 MiB"):
                await tools["big"].call({"size": 6_000_000})
            assert await tools["echo"].call({"text": "still there"}) == "still there"
            await servers.close()

    asyncio.run(main())


def test_server_that_needs_a_key_gets_it_in_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_KEY", "Bearer secret")
    seen: list[str] = []
    port = free_port("127.0.0.1")

    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        spec = McpSpec(use="mcp", url=f"http://127.0.0.1:{port}/mcp", headers={"Authorization": "$ASYNCRL_TEST_KEY"})
        async with served(refuses, port):
            with pytest.raises(ConfigError, match="Its tools could not be listed"):
                await ask(spec, "tools.0")

    asyncio.run(main())
    assert set(seen) == {"Bearer secret"}
