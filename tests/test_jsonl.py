"""Lines reach whoever follows, whole and once; a file that is replaced is never half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import RecordError
from asyncrl.jsonl import Tail, append, replace


def test_follower_sees_every_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tail = Tail(path)
    assert tail() == []
    append(path, {"a": "é"})
    append(path, {"a": 2})
    with path.open("a") as file:
        file.write('{"a": 3')
    assert tail() == [{"a": "é"}, {"a": 2}]
    assert tail() == []
    with path.open("a") as file:
        file.write("}\n")
    assert tail() == [{"a": 3}]


@given(cuts=st.lists(st.integers(1, 12), max_size=40))
def test_wherever_the_writer_pauses(tmp_path_factory, cuts: list[int]) -> None:
    path = tmp_path_factory.mktemp("tail") / "a.jsonl"
    records = [{"step": number, "text": "ü" * number} for number in range(5)]
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    tail, found = Tail(path), []
    for cut in [*cuts, len(data)]:
        with path.open("ab") as file:
            file.write(data[:cut])
        data = data[cut:]
        found += tail()
    assert found == records


@pytest.mark.parametrize("line", ['{"a": ', "[1]", "\x00\x00", ""])
def test_damaged_line_is_named_with_its_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    with pytest.raises(RecordError, match=r"a\.jsonl: line 2 is damaged .*: repair the line, or delete it"):
        Tail(path)()


def test_replaced_file_holds_the_last_record_alone(tmp_path: Path) -> None:
    for number in range(2):
        replace(tmp_path / "a.json", {"number": number})
    assert json.loads((tmp_path / "a.json").read_text()) == {"number": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
