"""What this folder adds: tools for any task, and how their questions are shown."""

from __future__ import annotations

from asyncrl import extension


class ToolHooks(extension.PlayerHooks):
    """Tools in a process that plays episodes."""

    async def close(self) -> None:
        """Close the sandboxes and servers that the episodes shared."""
        from asyncrl.extensions.tools.shared import close_shared

        await close_shared()


class Tools(extension.Extension):
    """Tools and shells."""

    wrappers = {"tools": "asyncrl.extensions.tools.tooled:with_tools"}  # noqa: RUF012
    question = "asyncrl.extensions.tools.system:with_tools_shown"

    def player(self) -> extension.PlayerHooks:
        """Return the hooks in a process that plays episodes."""
        return ToolHooks()


Own = Tools
