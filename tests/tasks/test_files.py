"""Questions from files of any kind: every one works, or is refused with its line and what to do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from asyncrl.config import load
from asyncrl.errors import ConfigError
from asyncrl.tasks import build
from asyncrl.tasks.files import FileTask
from tests.fakes import compose_values

GOOD = {"question": "1 + 1?", "answer": "2"}


def task(file: Path) -> FileTask:
    values = compose_values("experiment=tiny", "task=file", f"task.train_file={file}", "task.reward=exact")
    values["task"] |= {"prompt_key": "question", "answer_key": "answer"}
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
        (line(GOOD) + b"\n{'question': 1}\n", "rows.jsonl, line 3'. Not JSON"),
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
        (line({"question": "1"}), "Row 0 of task.train_file has only the fields ['question']"),
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


# --- datasets of the Hub, or in a folder ------------------------------------------------------------------


def of_dataset(*overrides: str) -> FileTask:
    made: Any = build(load(compose_values("experiment=tiny", "task=hf", *overrides)).task)
    return made


def test_a_folder_holds_the_splits_of_a_dataset_in_any_of_its_forms(tmp_path: Path) -> None:
    """As the Hub has them, with a folder for each configuration, and as `datasets` saves them."""
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    tests = [{"question": "held out?", "answer": "#### 0"}]
    hub, saved, plain = tmp_path / "hub", tmp_path / "saved", tmp_path / "plain"
    for folder in (hub / "main", saved / "train", saved / "test", plain):
        folder.mkdir(parents=True)
    for part in (0, 1):
        table = pyarrow.Table.from_pylist(rows[2 * part : 2 * part + 2])
        pyarrow.parquet.write_table(table, hub / "main" / f"train-0000{part}-of-00002.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(tests), hub / "main" / "test-00000-of-00001.parquet")
    for split, of_split in (("train", rows), ("test", tests)):
        table = pyarrow.Table.from_pylist(of_split)
        with pyarrow.ipc.new_stream(saved / split / "data-00000-of-00001.arrow", table.schema) as stream:
            stream.write_table(table)
        (saved / split / "dataset_info.json").write_text("{}")
        (plain / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_split))
    questions = [row["question"] for row in rows]
    for folder, more in ((hub, ["task.subset=main"]), (saved, []), (plain, [])):
        assert asked(of_dataset(f"task.dataset={folder}", *more)) == questions
        both = of_dataset(f"task.dataset={folder}", "task.eval_split=test", *more)
        assert (asked(both), both.held_out) == (["held out?", *questions], 1)
    with pytest.raises(ConfigError, match=r"task.train_split: got 'trian'. .*no files of this split"):
        of_dataset(f"task.dataset={plain}", "task.train_split=trian")


@pytest.mark.parametrize("split", ["test", "Test[:10]", "train+test", "test_easy"])
def test_training_on_a_test_split_is_refused_and_evaluation_is_not(split: str) -> None:
    with pytest.raises(ConfigError, match=r"task.train_split: got .*useless for evaluation"):
        load(compose_values("experiment=tiny", "task=hf", "task.dataset=a/b", f"task.train_split='{split}'"))
    load(compose_values("experiment=tiny", "+task@eval.sets.x=hf", f"eval.sets.x.train_split='{split}'"))


def test_a_dataset_that_cannot_be_loaded_says_the_command_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"task.dataset: got 'openai/gsm8k'. .*pip install 'asyncrl\[hf\]'"):
        of_dataset("task.dataset=openai/gsm8k")

    def refuse(name: str, subset: str | None, split: str) -> None:
        raise ConnectionError(f"no route to {name}/{subset}/{split}")

    exceptions = SimpleNamespace(DatasetsError=KeyError)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", exceptions)
    fake = SimpleNamespace(load_dataset=refuse, exceptions=exceptions)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(ConfigError, match=r"gsm8k/main/train\)\. .*hf download --repo-type dataset openai/gsm8k"):
        of_dataset("task.dataset=openai/gsm8k", "task.subset=main")

    class Loaded(list[dict[str, str]]):
        features: ClassVar[dict[str, object]] = {}

    loaded = Loaded([GOOD])
    fake.load_dataset = lambda *_, **__: loaded
    assert asked(of_dataset("task.dataset=openai/gsm8k")) == [GOOD["question"]]
