"""Two turns with a tool: an MCP server of the taskset, which all episodes share."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["AdderTaskset"]


class AdderToolset(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """Adds."""

    TOOL_PREFIX = ""

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two whole numbers."""
        return str(a + b)


class AdderTask(vf.Task[vf.TaskData]):
    """Is answered with the sum."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last answer is the sum."""
        return float("3" in (trace.last_reply or ""))


class AdderTaskset(vf.Taskset[AdderTask, vf.TasksetConfig]):
    """One sum."""

    @classmethod
    def toolsets(cls, config):
        """Return the server."""
        return [AdderToolset(vf.SharedToolsetConfig())]

    def load(self):
        """Yield the tasks."""
        yield AdderTask(vf.TaskData(name="add", prompt="12"), self.config.task)


if __name__ == "__main__":  # verifiers starts `python -m toy_adder`
    AdderToolset.run()
