"""Questions and their scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest

from asyncrl import tasks
from asyncrl.errors import ConfigError
from asyncrl.rewards.reward import RewardInput
from asyncrl.schema import Trajectory
from asyncrl.tasks import ask
from asyncrl.tasks.build import build as build_task
from asyncrl.tasks.build import build_all
from asyncrl.tasks.files import FileTask
from asyncrl.tasks.scores import rewards
from tests.fakes import tiny_config

ROWS = [{"prompt": f"{i} + 1 =", "answer": i + 1, "level": i % 2} for i in range(4)]


def build(**changes: Any) -> tasks.Task:
    return build_task(tiny_config(**{f"task.{name}": value for name, value in changes.items()}).task)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def from_file(path: str, **changes: Any) -> FileTask:
    task = build(kind="file", params={}, train_file=path, **changes)
    assert isinstance(task, FileTask)
    return task


# --- copy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("123", 2.0), ("124", 2 / 3), ("1", 1 / 3), ("", 0.0), ("1234", 1.0), (" 123", 0.0), ("321", 1 / 3)],
)
def test_copy_rewards_right_places_and_an_exact_answer(answer: str, reward: float) -> None:
    task = build(params={"digits": 3})
    assert task.score(answer, {"answer": "123"}) == pytest.approx(reward)
    assert task.correct(reward) is (answer == "123")


def test_copy_question_is_a_function_of_its_number() -> None:
    task, again = build(params={"digits": 5}), build(params={"digits": 5})
    questions = [task.question(index) for index in range(50)]
    assert questions == [again.question(index) for index in range(50)]
    assert len({question["answer"] for question in questions}) > 45
    assert all(len(q["answer"]) == 5 and q["messages"][0]["content"] == q["answer"] for q in questions)


@pytest.mark.parametrize("digits", [0, 17, "3", None, 2.5])
def test_copy_refuses_any_other_number_of_digits(digits: Any) -> None:
    with pytest.raises(ConfigError, match="Must be a number from 1 to 16") as caught:
        build(params={"digits": digits})
    assert (caught.value.field, caught.value.value) == ("task.params.digits", digits)


# --- files --------------------------------------------------------------------------------------------------


def test_jsonl_and_parquet_of_the_same_rows_are_the_same_task(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    first = from_file(jsonl(tmp_path / "rows.jsonl", ROWS))
    second = from_file(str(tmp_path / "rows.parquet"))
    assert first.size == second.size == 4
    for index in range(4):
        assert (
            first.question(index)
            == second.question(index)
            == {**ROWS[index], "messages": [{"role": "user", "content": ROWS[index]["prompt"]}]}
        )


def test_system_message_comes_first_and_chats_stay(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [{"q": chat, "a": "x"}]
    task = from_file(jsonl(tmp_path / "rows.jsonl", rows), prompt_key="q", answer_key="a", system="Be short.")
    assert task.question(0)["messages"] == [{"role": "system", "content": "Be short."}, *chat]


@pytest.mark.parametrize(
    ("reward", "answer", "reference", "score"),
    [
        ("exact", " 12\n", "12", 1.0),
        ("exact", "12.", "12", 0.0),
        ("contains", "It is Paris, of course", "Paris", 1.0),
        ("contains", "It is Rome", "Paris", 0.0),
        ("number", "first 3, then 1,234.50", "1234.5", 1.0),
        ("number", "so -7", "-7", 1.0),
        ("number", "so 7", "-7", 0.0),
        ("number", "no idea", "7", 0.0),
        ("number", "no idea", "neither", 0.0),
        ("number", "8", 8, 1.0),
    ],
)
def test_named_rewards(tmp_path: Path, reward: str, answer: str, reference: Any, score: float) -> None:
    row = {"prompt": "?", "answer": reference}
    assert scored(jsonl(tmp_path / "rows.jsonl", [row]), answer, 0, reward=reward) == score


def scored(path: str, text: str, row: int, **changes: Any) -> Any:
    """Return the score of the reward of a task from this file."""
    config = tiny_config(
        **{"task.kind": "file", "task.params": {}, "task.train_file": path, "eval.questions": 0},
        **{f"task.{name}": value for name, value in changes.items()},
    )
    tasks = build_all(config)
    question = tasks["copy3"].question(row)
    return rewards(config, tasks)["copy3"](RewardInput(text, [text], question, Trajectory([])))


def twice_the_level(answer: str, row: dict[str, Any]) -> float:
    return 2.0 * row["level"] + len(answer)


def test_reward_by_import_path_sees_the_answer_and_the_whole_row(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert scored(path, "ab", 1, reward=f"{__name__}:twice_the_level") == 4.0


@pytest.mark.parametrize("reward", ["nearly", "no_such_module:f", f"{__name__}:missing", ""])
def test_unknown_reward_names_field_value_and_remedy(tmp_path: Path, reward: str) -> None:
    with pytest.raises(ConfigError, match=r"[Mm]ust be (one of|an import path)") as caught:
        scored(jsonl(tmp_path / "rows.jsonl", ROWS), "", 0, reward=reward)
    assert (caught.value.field, caught.value.value) == ("task.reward", reward)


def test_wrong_argument_of_a_reward_names_its_field(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        scored(jsonl(tmp_path / "rows.jsonl", ROWS), "", 0, reward="exact", reward_params={"answer_kye": "a"})
    assert caught.value.field.startswith("task.reward_params")


def test_file_without_a_reward_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.reward: got None"):
        scored(jsonl(tmp_path / "rows.jsonl", ROWS), "", 0, reward=None)


def test_reward_of_a_file_reads_the_answers_field_of_the_file(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"q": "?", "a": "x"}])
    assert scored(path, "x", 0, reward="exact", prompt_key="q", answer_key="a") == 1.0


def test_any_task_takes_a_reward_in_the_place_of_its_own(tmp_path: Path) -> None:
    config = tiny_config(**{"task.reward": "exact"})
    own = tiny_config()
    for settings, expected in ((config, 1.0), (own, 2.0)):
        tasks = build_all(settings)
        question = tasks["copy3"].question(0)
        answer = RewardInput(question["answer"], [question["answer"]], question, Trajectory([]))
        assert rewards(settings, tasks)["copy3"](answer) == expected


def test_unreadable_files_name_field_value_and_remedy(tmp_path: Path) -> None:
    good = jsonl(tmp_path / "good.jsonl", ROWS)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt":\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    for name, remedy in {
        "missing.jsonl": "There is no such file",
        "broken.jsonl": "Not JSON",
        "empty.jsonl": "The file has no rows",
        "rows.csv": "Must end in .jsonl, .json, .parquet or .arrow",
    }.items():
        path = str(tmp_path / name)
        for field, files in (
            ("task.train_file", {"path": path}),
            ("task.eval_file", {"path": good, "eval_file": path}),
        ):
            with pytest.raises(ConfigError, match=remedy) as caught:
                from_file(**files)
            assert caught.value.field == field
            assert str(caught.value.value).startswith(path)
    with pytest.raises(ConfigError, match="line 2"):
        from_file(str(tmp_path / "broken.jsonl"))


@pytest.mark.parametrize("key", ["prompt_key", "answer_key"])
def test_row_without_the_configured_field_is_named(tmp_path: Path, key: str) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(
        ConfigError, match=r"got 'text'. Row 0 of task.train_file has only the fields \['answer', 'level', 'prompt'\]"
    ):
        from_file(path, **{key: "text"})


# --- of a whole run -----------------------------------------------------------------------------------------


def test_every_task_is_built_and_a_wrong_one_names_its_field() -> None:
    task = tiny_config().task.model_dump()
    wrong = {**task, "params": {"digits": 99}}
    config = tiny_config(tasks={"one": task, "two": task}, **{"eval.sets": {"more": task}})
    assert list(build_all(config)) == ["one", "two", "more"]
    for changes, field in (
        ({"tasks": {"one": task, "two": wrong}}, "tasks.two.params.digits"),
        ({"eval.sets": {"more": wrong}}, "eval.sets.more.params.digits"),
        ({"task": wrong}, "task.params.digits"),
    ):
        with pytest.raises(ConfigError) as caught:
            build_all(tiny_config(**changes))
        assert caught.value.field == field


class Junk:
    """A task that returns what it is told to."""

    def __init__(self, returns: Any) -> None:
        self.question = lambda index: returns


@pytest.mark.parametrize(
    "returns",
    [
        *(None, 0.5, "a text", ["a text"], {}, {"prompt": "a text"}),
        *({"messages": junk} for junk in ([], "a text", 0.5, ["a text"], [{"content": "a text"}], [{"role": "user"}])),
        *({"messages": [{"role": "user", "content": junk}]} for junk in (0.5, b"bytes", {"text": "x"}, ["a text"])),
    ],
)
def test_question_without_messages_is_refused(returns: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"task: got 3\. question\(3\) of the task failed: .* no list of messages"
    ) as caught:
        ask(Junk(returns), 3, "task")  # type: ignore[arg-type]
    assert repr(returns) in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "a text"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "tool_calls": []},
    ],
)
def test_chats_of_every_form_are_questions(message: dict[str, Any]) -> None:
    question = {"messages": (message,)}
    assert ask(Junk(question), 0, "task") is question  # type: ignore[arg-type]


class Sized:
    """A task whose size is what it is told."""

    def __init__(self, size: Any = None) -> None:
        self.size = size

    def question(self, index: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": str(index)}]}

    def score(self, text: str, record: dict[str, Any]) -> float:
        return 0.0


class Blocking(Sized):
    """A task that plays without await."""

    def run(self, prompt: Any, generate: Any) -> float:
        return 0.0


@pytest.mark.parametrize("size", [0, -1, 2.0, "5", print])
def test_size_that_is_no_number_of_questions_is_refused(size: Any) -> None:
    with pytest.raises(ConfigError, match=r"task.kind: .* Its size, .* must be the number of questions"):
        build(kind=f"{__name__}:Sized", params={"size": size})
    assert build(kind=f"{__name__}:Sized", params={"size": numpy.int64(5)}).size == 5


def test_task_that_plays_without_await_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task.kind: .* must be async"):
        build(kind=f"{__name__}:Blocking", params={})
