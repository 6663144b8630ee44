"""Questions from files of any kind: every one works, or is refused with its line and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.tasks.build import build
from asyncrl.tasks.files import FileTask
from tests.fakes import compose_values

GOOD = {"question": "1 + 1?", "answer": "2"}


def task(file: Path) -> FileTask:
    values = compose_values("experiment=tiny", "task=file", "task.train_file=/rows", "task.reward=exact")
    values["task"] |= {"train_file": str(file), "prompt_key": "question", "answer_key": "answer"}
    made: Any = build(load(values).task)
    return made


def asked(one: FileTask) -> list[str]:
    return [one.question(index)["messages"][-1]["content"] for index in range(one.size)]


@pytest.mark.parametrize(
    "text",
    [
        "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg",  # what str.splitlines takes for ends of lines
        "ÄÖ 漢字 🙂 \x00",
        "\r\n",
        " ",
    ],
)
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_lines_end_with_a_newline_and_nothing_else(text: str, ending: str, tmp_path: Path) -> None:
    rows = [{**GOOD, "question": text}, GOOD]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(("\ufeff" + ending.join([*lines, "", "  "])).encode())
    assert asked(task(file)) == [text, "1 + 1?"]


def test_json_file_may_hold_one_array(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([GOOD, {**GOOD, "question": "2 + 2?"}], indent=1))
    assert asked(task(tmp_path / "rows.json")) == ["1 + 1?", "2 + 2?"]


def test_answer_key_reaches_into_an_object(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"style": "rule", "ground_truth": "2"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    key = "task.answer_key=reward_model.ground_truth"
    file = f"task.train_file={tmp_path / 'rows.parquet'}"
    config = load(compose_values("experiment=tiny", "task=file", file, "task.reward=exact", key))
    made: Any = build(config.task)
    assert made.question(0)["reward_model.ground_truth"] == "2"
    with pytest.raises(ConfigError, match="has only the fields"):
        build(load(compose_values("experiment=tiny", "task=file", file, "task.reward=exact", f"{key}s")).task)


def test_parquet_is_read_with_lists_of_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    table = pyarrow.Table.from_pylist([{**GOOD, "question": messages}])
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert asked(task(tmp_path / "rows.parquet")) == ["1 + 1?"]


def line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (line(GOOD) + b'{"question": "\xff"}\n', "rows.jsonl, line 2'. Not UTF-8"),
        (
            line(GOOD) + b"\n{'question': 1}\n",
            "rows.jsonl, line 3'. Not JSON: Expecting property name enclosed in double quotes, at column 2.",
        ),
        (b"1\n", "line 1'. Every row must be an object with the task's fields, not int"),
        (b"null\n", "must be an object with the task's fields, not NoneType"),
        (line([GOOD, GOOD]), "must be an object with the task's fields, not list"),
        (b'"text"\n', "must be an object with the task's fields, not str"),
        (
            b'{"question": "\\ud800", "answer": "2"}\n',
            "line 1'. It cannot be stored in a recording: UnicodeEncodeError",
        ),
        (b'{"question": "1", "answer": %s}\n' % (b"9" * 30), "It cannot be stored in a recording: OverflowError"),
        (b'{"question": "1", "answer": %s}\n' % (b"9" * 5000), "line 1'. Not JSON: Exceeds the limit"),
        (
            b'{"question": "1", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
            "line 1'. Not JSON: maximum recursion",
        ),
        (b"", "The file has no rows"),
        (b"\n \n", "The file has no rows"),
        (
            line({"question": "1"}),
            "Row 0 of task.train_file has only the fields ['question']; rows are counted from 0.",
        ),
        (line(GOOD) + line({**GOOD, "question": 7}), "Row 1 of task.train_file has 7: it must be a text, or a list"),
        (line({**GOOD, "question": None}), "Row 0 of task.train_file has None: it must be a text, or a list"),
        (line({**GOOD, "question": []}), "Row 0 of task.train_file has []: it must be a text, or a list"),
        (line({**GOOD, "question": [{"text": "x"}]}), "it must be a text, or a list of messages with role and content"),
    ],
)
def test_what_is_no_row_is_refused_with_its_line(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(told)):
        task(file)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("rows.parquet", b"PAR1 and nothing more", "Not a complete parquet file"),
        ("rows.parquet", b"", "Not a complete parquet file"),
        ("rows.json", b"[1]", "rows.json, row 0'. Every row must be an object"),
        ("rows.json", b"[", "Not JSON"),
        ("rows.csv", b"a,b", "Must end in .jsonl, .json, .parquet"),
    ],
)
def test_files_of_other_kinds_and_broken_ones_are_refused(name: str, content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(told)):
        task(tmp_path / name)


def test_parquet_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD] * 1000), file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="Not a complete parquet file"):
        task(file)
