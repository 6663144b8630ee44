"""Servers over HTTP, as the mcp package makes them: what they answer, that it is too long, and that they go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import Context, MCPServer

from asyncrl.envs.tools.mcp_tools import McpServers, McpSpec, ask
from asyncrl.envs.tools.tool import ToolError
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.ports import free_port
from tests.envs.tools.waits import eventually

pytestmark = pytest.mark.integration


@asynccontextmanager
async def served(port: int, **options: Any) -> AsyncIterator[None]:
    server = MCPServer("test", log_level="CRITICAL")

    @server.tool()
    async def echo(text: str) -> str:
        return text

    @server.tool()
    async def big(size: int, stream: bool, context: Context) -> str:
        if stream:
            await context.report_progress(1, 2)
        return "x" * size

    @server.tool()
    async def hang() -> str:
        await asyncio.Event().wait()
        return ""

    config = uvicorn.Config(server.streamable_http_app(**options), port=port, log_level="critical", lifespan="on")
    serving = uvicorn.Server(config)
    task = asyncio.create_task(serving.serve())
    await eventually(lambda: serving.started)
    try:
        yield
    finally:
        serving.should_exit = serving.force_exit = True
        await task


@pytest.mark.parametrize("options", [{}, {"json_response": True}, {"stateless_http": True}])
def test_server_over_http_answers_hangs_goes_away_and_comes_back(options: dict[str, Any]) -> None:
    port = free_port("127.0.0.1")
    spec = McpSpec(use="mcp", url=f"http://127.0.0.1:{port}/mcp", restarts=0)

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"It gives no tools: .* is gone: ConnectError"):
            await ask(spec, "tools.0")
        servers = McpServers(spec)
        async with asyncio.timeout(60):
            async with served(port, **options):
                tools: dict[str, Any] = {tool.name: tool for tool in await servers.episode("tools.0")}
                assert await tools["echo"].call({"text": "hi"}) == "hi"
                for stream in (False, True):
                    with pytest.raises(ToolError, match="larger than 4 MiB"):
                        await tools["big"].call({"size": 6_000_000, "stream": stream})
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(tools["hang"].call({}), 0.1)
                assert await tools["echo"].call({"text": "still there"}) == "still there"
            with pytest.raises(EpisodeFailed, match="tool: the MCP server http"):
                await tools["echo"].call({"text": "into the void"})
            async with served(port, **options):
                assert await tools["echo"].call({"text": "again"}) == "again"
            await servers.close()

    asyncio.run(main())


def test_server_that_needs_a_key_gets_it_in_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCRL_TEST_KEY", "Bearer secret")
    seen: list[str] = []
    port = free_port("127.0.0.1")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(dict(scope["headers"]).get(b"authorization", b"").decode())
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body"})

    async def main() -> None:
        serving = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", lifespan="off"))
        task = asyncio.create_task(serving.serve())
        await eventually(lambda: serving.started)
        url = f"http://127.0.0.1:{port}/mcp"
        with pytest.raises(ConfigError, match="It gives no tools"):
            await ask(McpSpec(use="mcp", url=url, headers={"Authorization": "$ASYNCRL_TEST_KEY"}), "tools.0")
        serving.should_exit = True
        await task

    asyncio.run(main())
    assert set(seen) == {"Bearer secret"}
