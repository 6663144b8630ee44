"""Datasets of the Hub, or in a folder: every form of a split is read, or refused with what to do."""

from __future__ import annotations

import json
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
from asyncrl.tasks.build import build
from asyncrl.tasks.files import FileTask
from tests.fakes import changed, compose_values

GOOD = {"question": "1 + 1?", "answer": "2"}


def asked(one: FileTask) -> list[str]:
    return [one.question(index)["messages"][-1]["content"] for index in range(one.size)]


def of_dataset(*overrides: str) -> FileTask:
    made: Any = build(load(compose_values("experiment=tiny", "task=hf", *overrides)).task)
    return made


def test_folder_holds_splits_of_a_dataset_in_any_form(tmp_path: Path) -> None:
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
def test_training_on_a_test_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=r"task.train_split: got .*useless for evaluation"):
        load(changed(compose_values("experiment=tiny", "task=hf", "task.dataset=a/b"), {"task.train_split": split}))
    evaluated = compose_values("experiment=tiny", "+task@eval.sets.x=hf")
    load(changed(evaluated, {"eval.sets.x.train_split": split}))


def test_missing_dataset_names_the_command_that_loads_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
