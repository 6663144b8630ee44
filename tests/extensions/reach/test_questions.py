"""With --check all questions are read, as the rollout process reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from asyncrl.config import load
from asyncrl.extensions.reach.questions import look
from asyncrl.launch.checks import versions
from asyncrl.models import catalog
from tests.fakes import compose_values
from tests.launch.checks.worlds import command

LONG = [{"prompt": "1" * (70 if row % 10 == 3 else 1 + row % 9), "answer": "1"} for row in range(40)]
BREAKS = """
class Game:
    def question(self, index):
        print("user code")
        raise ValueError("no such question")

    def reset(self, question):
        pass

    async def step(self, action):
        pass
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Return the settings of a run whose task reads 40 rows, in a folder with other files and a module of a user's."""
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in LONG))
    (tmp_path / "same.jsonl").write_text(f"{json.dumps(LONG[0])}\n" * 9)
    (tmp_path / "one.jsonl").write_text(f"{json.dumps(LONG[0])}\n")
    (tmp_path / "breaks.py").write_text(BREAKS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    file = f"task.train_file={tmp_path}/rows.jsonl"
    return ("task=file", file, "task.reward=exact", "eval.questions=2", "task.name=file")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ((), 0, "4 of the 40 questions of file are longer than the 61 tokens"),
        (
            ("task.kind=breaks:Game", "task.train_file=null", "task.reward=null"),
            1,
            " of the task failed: ValueError: no such question (",
        ),
    ],
)
def test_questions_are_read_as_the_run_would_read_them(
    arguments: tuple[str, ...], code: int, told: str, rows: tuple[str, ...], tmp_path: Path
) -> None:
    """Over-long rows, and a task of a user's that has none."""
    done = command("--check", *rows, *arguments, cwd=tmp_path)
    assert told in " ".join((done.stdout + done.stderr).split()), done.stdout + done.stderr
    assert done.returncode == code


@pytest.mark.parametrize(
    ("argument", "field", "remedy"),
    [
        ("rollout.overlong_prompts=refuse", "rollout.overlong_prompts", "4 of the 40 questions of file are longer"),
        ("eval.questions=40", "eval.questions", "Task file has 40 questions, so that none would be left"),
        ("task.train_file={folder}/same.jsonl", "eval.questions", "Task file has only 1 distinct questions"),
        (
            "task.train_file={folder}/one.jsonl",
            "eval.questions",
            "Task file has 1 questions, so that none would be left",
        ),
    ],
)
def test_wrong_questions_are_an_error_of_a_field(
    argument: str, field: str, remedy: str, rows: tuple[str, ...], tmp_path: Path
) -> None:
    config = load(compose_values("experiment=tiny", *rows, argument.format(folder=tmp_path)))
    (told,) = look(config, catalog.resolve("builtin:tiny"))
    assert (told[0], told[1], remedy in told[3]) == ("error", field, True), told


VERSIONS = (
    "ok"
    if all(versions.installed()[name].partition("+")[0] == pin for name, pin in versions.pinned().items())
    else "warning"
)
"""What a check says of the packages that the tests run with: others than the lock's are a warning."""


def test_the_command_tells_versions_and_counts_questions(tmp_path: Path) -> None:
    done = command("--check", cwd=tmp_path)
    assert f"{VERSIONS:8} versions" in done.stdout
    assert "ok       task" in done.stdout
    assert "100 held out for evaluation; the first one for training has 5 tokens" in " ".join(done.stdout.split())
