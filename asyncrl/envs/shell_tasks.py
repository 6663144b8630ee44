"""Small tasks in a shell, made up by number: task.kind=asyncrl.envs.shell_tasks:ShellTasks (asyncrl/envs/shell.py)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from asyncrl.envs.env import Question
from asyncrl.envs.shell import BASH, HOW, ShellEnv

WORDS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbor", "island", "jungle")


class ShellTasks(ShellEnv):
    """Endless: the index says which of KINDS, and seeds the rest."""

    def question(self, index: int) -> Question:
        """Same index, same task."""
        made = KINDS[index % len(KINDS)](random.Random(index))
        instruction = made.pop("instruction")
        if self._format is None:
            return {"messages": [{"role": "user", "content": f"{instruction}\n\n{HOW}"}], **made}
        return {"messages": [{"role": "user", "content": instruction}], "tools": [BASH], **made}


def write_a_line(draw: random.Random) -> dict[str, Any]:
    """A new file."""
    name, line = draw.choice(WORDS), " ".join(draw.sample(WORDS, 3))
    return {
        "instruction": f"Make a file {name}.txt with one line: {line}",
        "checks": [{"command": f"cat {name}.txt", "expect": line}],
    }


def count_lines(draw: random.Random) -> dict[str, Any]:
    """How often a word begins a line."""
    lines = [f"{draw.choice(WORDS[:4])} {draw.randrange(100)}" for _ in range(draw.randrange(10, 30))]
    word = lines[0].split()[0]
    count = sum(line.startswith(f"{word} ") for line in lines)
    return {
        "instruction": f"Write into answer.txt how many lines of log.txt begin with {word}: only the number.",
        "files": {"log.txt": "\n".join(lines) + "\n"},
        "checks": [{"command": "cat answer.txt", "expect": str(count)}],
    }


def rename_files(draw: random.Random) -> dict[str, Any]:
    """From one ending to another."""
    names = sorted(draw.sample(WORDS, 3))
    return {
        "instruction": "Rename every file in notes that ends in .txt so that it ends in .md; keep what is in it.",
        "files": {f"notes/{name}.txt": f"{name}\n" for name in names},
        "checks": [
            {"command": "ls notes", "expect": "\n".join(f"{name}.md" for name in names)},
            {"command": "cat notes/*.md", "expect": "\n".join(names)},
        ],
    }


def sort_lines(draw: random.Random) -> dict[str, Any]:
    """Without those that stand twice."""
    lines = [draw.choice(WORDS) for _ in range(8)]
    return {
        "instruction": "Write the lines of words.txt into sorted.txt, sorted by the alphabet, each of them once.",
        "files": {"words.txt": "\n".join(lines) + "\n"},
        "checks": [{"command": "cat sorted.txt", "expect": "\n".join(sorted(set(lines)))}],
    }


def mend_a_program(draw: random.Random) -> dict[str, Any]:
    """One line of it is wrong."""
    a, b = draw.randrange(2, 50), draw.randrange(2, 50)
    return {
        "instruction": "The function area in shapes.py shall return the area of a rectangle. Mend it.",
        "files": {"shapes.py": "def area(width, height):\n    return width + height\n"},
        "tests": {"check_area.py": f"import shapes\n\nprint(shapes.area({a}, {b}), shapes.area(1, 0))\n"},
        "checks": [{"command": "python check_area.py", "expect": f"{a * b} 0"}],
    }


KINDS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    write_a_line,
    count_lines,
    rename_files,
    sort_lines,
    mend_a_program,
)
