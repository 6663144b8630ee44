"""Questions of any task, answered with tools: the task's score judges the last answer (env.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config import TaskConfig
from asyncrl.envs.env import EnvSpec
from asyncrl.errors import ConfigError
from asyncrl.extensions.tools.toolbox import Spec, functions
from asyncrl.tasks import Question, Task

ENVIRONMENT = "asyncrl.extensions.tools.toolbox:ToolboxEnv"


class Tooled:
    """A task with tools."""

    def __init__(
        self, task: Task, tools: Sequence[Spec], options: Mapping[str, Any] | None = None, field: str = "task"
    ) -> None:
        """`tools` are described in specs.py, `options` are those of ToolEnv. MCP servers are started and asked for
        their tools. Raises ConfigError for `field`.tools and `field`.tool_options."""
        if getattr(task, "environment", None) or getattr(task, "agent", None):
            raise ConfigError(f"{field}.tools", list(tools), "The task has its own environment or agent.")
        self._task = task
        self._functions = functions(tools, f"{field}.tools")
        self.environment = EnvSpec(ENVIRONMENT, {"tools": list(tools), **(options or {})})
        try:
            self._format: str = self.environment.make().format
        except ConfigError as error:
            raise ConfigError(f"{field}.{error.field}", error.value, error.remedy) from None
        self.inline, self.held_out = task.inline, getattr(task, "held_out", 0)

    @property
    def size(self) -> int | None:
        """Number of questions of the task."""
        return self._task.size

    def question(self, index: int) -> Question:
        """Return the task's question with the tools."""
        return {**self._task.question(index), "tools": self._functions, "tool_format": self._format}

    def score(self, answer: str, question: Question) -> float:
        """Return the task's score."""
        return self._task.score(answer, question)

    def correct(self, reward: float) -> bool:
        """Return what the task says."""
        return self._task.correct(reward)


def with_tools(task: Task, section: TaskConfig) -> Tooled:
    """Return the task of a section with its tools."""
    return Tooled(task, section.tools, section.tool_options)
