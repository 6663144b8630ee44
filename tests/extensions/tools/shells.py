"""Commands that a shell is given, and what solves the shipped tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.envs.env import Step
from asyncrl.extensions.tools.shell import ShellEnv
from tests.extensions.tools.scripts import run

QUESTION = {
    "messages": [],
    "files": {"data/n.txt": "1\n2\n"},
    "tests": {"check.sh": "cat answer.txt"},
    "checks": [
        {"command": "sh check.sh", "expect": "3"},
        {"command": "test -f answer.txt"},
        {"command": "cat data/n.txt", "expect": "1\n2"},
        {"command": "false"},
    ],
}
SANDBOX = {"sandbox": "tests.extensions.tools.sandboxes:Folders"}


def play(*texts: str, question: dict[str, Any] = QUESTION, **options: Any) -> list[Step]:
    async def script() -> list[Step]:
        env = ShellEnv(**SANDBOX, **options)
        await env.reset(question)
        try:
            return [await env.step(text) for text in texts]
        finally:
            await env.close()

    return run(script)


def block(command: str) -> str:
    return f"I will.\n```bash\n{command}\n```\n"


SOLUTIONS: list[Callable[[str], str]] = [
    lambda text: "echo '{}' > {}".format(text.split("one line: ")[1].split("\n")[0], text.split()[3]),
    lambda text: f"grep -c '^{text.split('begin with ')[1].split(':')[0]} ' log.txt > answer.txt",
    lambda text: 'for f in notes/*.txt; do mv "$f" "${f%.txt}.md"; done',
    lambda text: "sort -u words.txt > sorted.txt",
    lambda text: "sed -i 's/+/*/' shapes.py",
]
