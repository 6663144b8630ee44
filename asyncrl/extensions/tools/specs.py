"""Tools by specification, as a configuration has them:

{"use": "my_module:weather"}                                a function, or a Tool; a class of Tools is instantiated
                                                            for each episode, with `params`
{"use": "python", "seconds": 5, "sandbox_params": {...}}    Python in a sandbox (python.py, shared.py)
{"use": "mcp", "command": ["python", "-m", "my_server"]}    a server's tools (mcp_tools.py)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.extensions.tools.functions import FunctionTool
from asyncrl.extensions.tools.python import PythonTool
from asyncrl.extensions.tools.shared import LOCAL, check_sandboxes, sandboxes
from asyncrl.extensions.tools.tool import OnFault, Tool
from asyncrl.user_code import check_arguments, load

PARTS = ("name", "description", "parameters", "call")
"""Parameters of a Tool."""


class ToolSource(Protocol):
    """Source of tools. `field` is the setting that a ConfigError names."""

    def check(self, field: str) -> None:
        """Raise ConfigError for mistakes that are visible without starting anything."""
        ...

    def listed(self, field: str) -> Sequence[Tool]:
        """Return the tools as far as they are known before an episode; an MCP server is started and asked. Raises
        ConfigError."""
        ...

    async def episode(self, field: str) -> Sequence[Tool]:
        """Return the tools of one episode."""
        ...


class PythonSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Python in a sandbox; see PythonTool and shared.sandboxes."""

    use: str
    seconds: float | None = None
    session: bool = True
    output_chars: int = 4000
    sandbox: str = LOCAL
    sandbox_params: dict[str, Any] = {}

    def check(self, field: str) -> None:
        """See ToolSource.check."""
        check_sandboxes(self.sandbox, self.sandbox_params, f"{field}.sandbox")

    def listed(self, field: str) -> Sequence[Tool]:
        """See ToolSource.listed."""
        made = PythonTool(
            lambda: sandboxes(self.sandbox, self.sandbox_params),
            seconds=self.seconds,
            session=self.session,
            output_chars=self.output_chars,
        )
        return [made]

    async def episode(self, field: str) -> Sequence[Tool]:
        """See ToolSource.episode."""
        return self.listed(field)


class CustomToolSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A user's own tool. `timeout` and `on_fault` apply to a function; a Tool has its own."""

    use: str
    params: dict[str, Any] = {}
    timeout: float | None = None
    on_fault: OnFault | None = None

    def check(self, field: str) -> None:
        """See ToolSource.check."""
        self._maker(field)

    def listed(self, field: str) -> Sequence[Tool]:
        """See ToolSource.listed."""
        return [self._maker(field)()]

    async def episode(self, field: str) -> Sequence[Tool]:
        """See ToolSource.episode."""
        return self.listed(field)

    def _maker(self, field: str) -> Callable[[], Tool]:
        found = load(self.use, f"{field}.use")
        if not inspect.isroutine(found):
            for name, value in (("timeout", self.timeout), ("on_fault", self.on_fault)):
                if value is not None:
                    remedy = f"It applies to functions; {self.use} sets its own attribute {name}."
                    raise ConfigError(f"{field}.{name}", value, remedy)
        if isinstance(found, type):
            check_arguments(found, self.params, f"{field}.params", self.use)
            return lambda: _tool(found(**self.params), self.use, field)
        if self.params:
            raise ConfigError(
                f"{field}.params", self.params, f"{self.use} is not a class and takes no params: remove them."
            )
        if inspect.isroutine(found):
            made = _function(found, self.timeout, self.on_fault, field)
            return lambda: made
        return lambda: _tool(found, self.use, field)


def source(spec: Mapping[str, Any], field: str) -> ToolSource:
    """Return the source that a specification describes. Raises ConfigError."""
    use = spec.get("use")
    if use == "python":
        kind: Any = PythonSpec
    elif use == "mcp":
        try:
            from asyncrl.extensions.tools.mcp_tools import McpSpec as kind
        except ImportError as error:
            raise ConfigError(f"{field}.use", use, f"Needs the package mcp, version 2 ({error}).") from None
    elif isinstance(use, str) and ":" in use:
        kind = CustomToolSpec
    else:
        raise ConfigError(f"{field}.use", use, "Must be python, mcp, or an import path, module:name.")
    try:
        made: ToolSource = msgspec.convert(dict(spec), kind)
    except ValueError as error:  # includes msgspec's ValidationError
        raise ConfigError(field, dict(spec), f"{error}.") from None
    made.check(field)
    return made


def _tool(found: Any, path: str, field: str) -> Tool:
    if missing := [part for part in PARTS if not hasattr(found, part)]:
        raise ConfigError(f"{field}.use", path, f"Must be a function or a tool: it lacks {', '.join(missing)}.")
    tool: Tool = found
    return tool


@cache
def _function(found: Callable[..., Any], timeout: float | None, on_fault: OnFault | None, field: str) -> FunctionTool:
    """Return the tool of a function, shared by all episodes because it counts the threads that hang."""
    try:
        return FunctionTool(found, timeout=timeout, on_fault=on_fault)
    except ValueError as error:
        raise ConfigError(f"{field}.use", getattr(found, "__name__", found), f"{error}.") from None
