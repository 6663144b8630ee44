"""Harness of verifiers that runs its chat loop in the worker itself: no `uv`, and no program per episode. Its tools are
the MCP servers of the task; it runs no code of the model. verifiers allows it: "The interception is the contract, not
the process" (Harness.launch)."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import verifiers.v1 as vf
from mcp.shared.exceptions import MCPError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["InlineChat"]

# No connection is kept: at the end of a rollout verifiers cancels the handlers of its requests, which can close a
# connection that another rollout would use next.
_SHARED = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=1000, max_keepalive_connections=0))


class InlineChat(vf.Harness[vf.HarnessConfig]):
    """Chat until the model calls no more tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Play one segment."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
        async with contextlib.AsyncExitStack() as stack:
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            tools, dispatch, servers = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                answer = await _SHARED.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {}),
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                said = answer.json()["choices"][0]["message"]
                messages.append({name: value for name, value in said.items() if value is not None})
                for call in said.get("tool_calls") or []:
                    told = {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"]}
                    messages.append(told | {"content": await self._called(servers, dispatch, call["function"])})
                if not said.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _called(self, servers: Any, dispatch: Any, function: dict[str, Any]) -> Any:
        if function["name"] not in dispatch:
            return f"error: there is no tool {function['name']!r}, but: {', '.join(dispatch)}"
        try:
            arguments = json.loads(function["arguments"] or "{}")
            return await call_mcp(servers, dispatch, function["name"], arguments)
        except (ValueError, MCPError) as error:  # what is wrong with the model's arguments; others fail the episode
            return f"error: {error}"
