"""Evaluation and training never share a question, and the seed alone fixes the order."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.agents.template import ChatTemplate
from asyncrl.errors import ConfigError
from asyncrl.models.catalog import resolve
from asyncrl.rollout import held_out
from asyncrl.rollout import prompts as module
from asyncrl.rollout.parts import load_tokenizer, stop_tokens
from asyncrl.rollout.prompts import Prompts
from asyncrl.schema import Prompt
from asyncrl.tasks.build import build_all
from tests.examples import examples
from tests.fakes import questions_with_long_ones, tiny_config, tiny_values


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("builtin:tiny")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(model, None)


def build(tokenizer: Any, length: int = 64, **changes: Any) -> Prompts:
    config = tiny_config(**changes)
    return Prompts(config, build_all(config), ChatTemplate(tokenizer), length)


def first(prompts: Prompts, count: int, task: str = "copy3") -> list[Prompt]:
    return list(itertools.islice(prompts.training[task], count))


def ids(prompts: list[Prompt]) -> set[tuple[int, ...]]:
    return {tuple(prompt.token_ids) for prompt in prompts}


@pytest.mark.parametrize(("digits", "questions"), [(1, 0), (1, 4), (1, 9), (2, 50), (2, 97), (3, 100)])
def test_training_draws_everything_but_what_is_held_out(tokenizer: Any, digits: int, questions: int) -> None:
    prompts = build(tokenizer, **{"task.params": {"digits": digits}, "eval.questions": questions})
    held_out = prompts.held_out.get("copy3", [])
    assert len(ids(held_out)) == len(held_out) == questions
    drawn = ids(first(prompts, 1000 if digits == 2 else 100))
    assert not drawn & ids(held_out)
    if digits < 3:
        assert len(drawn) == 10**digits - questions


@pytest.mark.parametrize("count", [0, 1, 9, 40])
@pytest.mark.parametrize("endless", [True, False])
def test_prompts_go_on_where_a_checkpoint_was(tokenizer: Any, file: dict, endless: bool, count: int) -> None:
    """Past questions that are left out, and through epochs that are shuffled anew."""
    settings = {"task.params": {"digits": 1}} if endless else file
    task = "copy3" if endless else next(iter(build(tokenizer, **file, **{"eval.questions": 4}).training))
    whole, before, after = (build(tokenizer, **settings, **{"eval.questions": 4}) for _ in range(3))
    expected = first(whole, count + 20, task)
    drawn = first(before, count, task)
    after.go_on(before.cursor())
    assert [*drawn, *first(after, 20, task)] == expected
    assert after.cursor() == whole.cursor()
    for prompt in drawn:  # those under way are rendered again
        assert after.again(prompt.uid, prompt.task, prompt.index) == prompt


def test_question_that_is_no_more_is_no_part_of_a_resumed_run(tokenizer: Any, file: dict) -> None:
    prompts = build(tokenizer, **file, **{"eval.questions": 4})
    for task, index in ((next(iter(prompts.training)), 10**9), ("other", 0)):
        with pytest.raises(
            ConfigError,
            match=f"resume: got '{task}'. The checkpoint has an unfinished group on question {index} of task {task}",
        ):
            prompts.again("p0", task, index)


class Alike:
    """A game whose questions have one text."""

    def question(self, index: int) -> dict[str, Any]:
        """Return the question with its seed."""
        return {"messages": [{"role": "user", "content": " "}], "seed": index}

    def score(self, text: str, record: dict[str, Any]) -> float:
        """Return 0."""
        return 0.0


def test_questions_of_one_text_are_told_apart_by_their_seeds(tokenizer: Any) -> None:
    """Games open alike: some are held out, and the others are trained."""
    kind = {"task.kind": f"{__name__}:Alike", "task.params": {}, "task.name": "game"}
    prompts = build(tokenizer, **kind, **{"eval.questions": 20})
    drawn = first(prompts, 50, "game")
    assert len(ids([*prompts.held_out["game"], *drawn])) == 1
    held_out = {prompt.question["seed"] for prompt in prompts.held_out["game"]}
    assert len(held_out) == 20
    assert not held_out & {prompt.question["seed"] for prompt in drawn}


def test_task_without_enough_questions_to_hold_out_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "MAX_SKIPS", 500)
    with pytest.raises(
        ConfigError, match="Task copy3 has only 10 distinct questions of up to 61 tokens, which is"
    ) as caught:
        build(tokenizer, **{"task.params": {"digits": 1}, "eval.questions": 11})
    assert (caught.value.field, caught.value.value) == ("eval.questions", 11)


def test_exhausted_task_is_refused_not_searched_for_ever(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SKIPS", 500)
    with pytest.raises(ConfigError, match="or add questions") as caught:
        first(build(tokenizer, **{"task.params": {"digits": 1}, "eval.questions": 10}), 1)
    assert (caught.value.field, caught.value.value) == ("eval.questions", 10)


def test_order_is_a_function_of_the_seed_and_uids_count_up(tokenizer: Any) -> None:
    same, again, other = (
        [prompt.token_ids for prompt in first(build(tokenizer, **{"run.seed": seed}), 40)] for seed in (5, 5, 6)
    )
    assert same == again
    assert same != other
    assert [prompt.uid for prompt in first(build(tokenizer), 3)] == ["p00000000", "p00000001", "p00000002"]


def test_held_out_questions_do_not_depend_on_the_seed(tokenizer: Any) -> None:
    first_, second = (build(tokenizer, **{"run.seed": seed}).held_out for seed in (1, 2))
    assert first_ == second


def test_prompt_is_the_rendered_chat(tokenizer: Any) -> None:
    prompts = build(tokenizer)
    (prompt,) = first(prompts, 1)
    digits = prompt.question["answer"]
    assert prompt.token_ids == [12, *(int(digit) for digit in digits), 11]
    assert ChatTemplate(tokenizer).decode([1, 2, 10]) == "12"


@pytest.fixture
def file(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"prompt": str(100 + i), "answer": str(i)}) + "\n" for i in range(12)))
    return {"task.kind": "file", "task.params": {}, "task.train_file": str(path)}


def test_finite_task_is_reshuffled_every_epoch(tokenizer: Any, file: dict) -> None:
    prompts = build(tokenizer, **file, **{"eval.questions": 4})
    assert [p.question["answer"] for p in prompts.held_out["copy3"]] == ["0", "1", "2", "3"]
    epochs = [[p.question["answer"] for p in first(prompts, 8)] for _ in range(3)]
    assert [sorted(epoch, key=int) for epoch in epochs] == [[str(i) for i in range(4, 12)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = build(tokenizer, **file, **{"eval.questions": 4})
    assert [p.question["answer"] for p in first(again, 24)] == [answer for epoch in epochs for answer in epoch]


def test_evaluation_file_leaves_out_repeated_questions(tokenizer: Any, file: dict, tmp_path: Path) -> None:
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in ("7", "105")))
    prompts = build(tokenizer, **file, **{"eval.questions": 2, "task.eval_file": str(held_out)})
    assert [prompt.question["prompt"] for prompt in prompts.held_out["copy3"]] == ["7", "105"]
    drawn = {p.question["prompt"] for p in first(prompts, 40)}
    assert drawn == {str(100 + i) for i in range(12)} - {"105"}


@pytest.mark.parametrize("questions", [12, 40])
def test_finite_task_with_no_training_questions_left_is_refused(tokenizer: Any, file: dict, questions: int) -> None:
    with pytest.raises(ConfigError, match="Task copy3 has 12 questions, so that none would be left") as caught:
        build(tokenizer, **file, **{"eval.questions": questions})
    assert (caught.value.field, caught.value.value) == ("eval.questions", questions)


# --- several tasks and sets ---------------------------------------------------------------------------------


def copy(digits: int, **changes: Any) -> dict[str, Any]:
    return {**tiny_values()["task"], "name": "copy", "params": {"digits": digits}, **changes}


def test_no_task_draws_a_question_that_any_set_holds_out(tokenizer: Any) -> None:
    """Two tasks and a set of the same hundred questions, and a set that is nobody's."""
    prompts = build(
        tokenizer,
        **{"tasks": {"one": copy(2), "other": copy(2)}, "eval.sets": {"more": copy(2), "long": copy(4)}},
        **{"eval.questions": 30},
    )
    assert {name: len(ids(held_out)) for name, held_out in prompts.held_out.items()} == dict.fromkeys(
        ("one", "other", "more", "long"), 30
    )
    assert all(prompt.task == name for name, held_out in prompts.held_out.items() for prompt in held_out)
    held_out = set().union(*map(ids, prompts.held_out.values()))
    for task in ("one", "other"):
        drawn = first(prompts, 400, task)
        assert {prompt.task for prompt in drawn} == {task}
        assert ids(drawn) == {(12, a, b, 11) for a in range(10) for b in range(10)} - held_out


def test_order_of_a_task_does_not_depend_on_the_others(tokenizer: Any) -> None:
    alone = build(tokenizer, tasks={"one": copy(3)})
    beside = build(tokenizer, tasks={"other": copy(5), "one": copy(3)})
    first(beside, 7, "other")
    assert [p.token_ids for p in first(alone, 50, "one")] == [p.token_ids for p in first(beside, 50, "one")]
    assert [p.token_ids for p in first(beside, 50, "other")] != [p.token_ids for p in first(beside, 50, "one")]


@given(st.lists(st.sampled_from(["one", "other"]), max_size=30))
def test_uids_are_unique_and_of_one_width_across_tasks(tokenizer: Any, drawn: list[str]) -> None:
    prompts = build(tokenizer, tasks={"one": copy(2), "other": copy(3)}, **{"eval.questions": 3})
    uids = [next(prompts.training[task]).uid for task in drawn]
    assert uids == [f"p{number:08d}" for number in range(len(drawn))]
    held_out = [prompt.uid for prompts_ in prompts.held_out.values() for prompt in prompts_]
    assert held_out == [f"e{number:08d}" for number in range(6)]


WEIGHTS = {"one": 1.0, "other": 3.0, "third": 4.0}


def three(tokenizer: Any, **changes: Any) -> Prompts:
    return build(tokenizer, tasks={name: copy(3) for name in WEIGHTS}, **changes)


def test_prompts_come_by_weight_and_each_task_in_its_order(tokenizer: Any) -> None:
    mixed, alone = three(tokenizer), three(tokenizer)
    drawn = [mixed.draw(WEIGHTS) for _ in range(4000)]
    shares = Counter(prompt.task for prompt in drawn)
    assert [shares[name] / 500 for name in WEIGHTS] == pytest.approx([1, 3, 4], rel=0.15)
    for name in WEIGHTS:
        own = [p.token_ids for p in drawn if p.task == name]
        assert own == [p.token_ids for p in first(alone, len(own), name)]
    assert {mixed.draw({"other": 1, "third": 0.0}).task for _ in range(100)} == {"other"}


@given(st.integers(0, 99), st.sampled_from([0.25, 2.0, 8.0]), st.integers(0, 20))
@settings(max_examples=examples(12))
def test_mixture_is_a_function_of_seed_and_weights(tokenizer: Any, seed: int, unit: float, count: int) -> None:
    """In whatever unit weights are given, and whatever those of earlier prompts were: each takes one number."""
    whole, scaled, before, after = (three(tokenizer, **{"run.seed": seed}) for _ in range(4))
    expected = [whole.draw(WEIGHTS).task for _ in range(count + 20)]
    weights = {name: unit * weight for name, weight in WEIGHTS.items()}
    assert [scaled.draw(weights).task for _ in range(count + 20)] == expected
    assert {before.draw({"one": 1.0}).task for _ in range(count)} <= {"one"}
    after.go_on(before.cursor())
    assert [after.draw(WEIGHTS).task for _ in range(20)] == expected[count:]


def test_other_seeds_give_other_mixtures(tokenizer: Any) -> None:
    made = (three(tokenizer, **{"run.seed": seed}) for seed in range(8))
    assert len({tuple(one.draw(WEIGHTS).task for _ in range(30)) for one in made}) == 8


def test_sets_of_files_give_up_to_the_number_asked_for(tokenizer: Any, file: dict, tmp_path: Path) -> None:
    """For a set without eval_file, all of train_file is used; training skips what coincides."""
    short = tmp_path / "short.jsonl"
    short.write_text("".join(json.dumps({"prompt": text, "answer": ""}) + "\n" for text in ("7", "105", "7")))
    rows = copy(3, kind="file", params={})
    sets = {
        "questions": rows | {"train_file": str(short)},
        "evaluation": rows | {"eval_file": str(short), "train_file": file["task.train_file"]},
        "many": rows | {"train_file": file["task.train_file"]},
    }
    prompts = build(tokenizer, **{"eval.questions": 5, "eval.sets": sets})
    found = {name: [p.question["prompt"] for p in one] for name, one in prompts.held_out.items() if name in sets}
    assert found == {"questions": ["7", "105"], "evaluation": ["7", "105"], "many": [str(100 + i) for i in range(5)]}
    assert not ids(first(prompts, 3000)) & {(12, 1, 0, n, 11) for n in range(6)}


def test_without_evaluation_nothing_is_held_out(tokenizer: Any) -> None:
    prompts = build(tokenizer, tasks={"one": copy(1), "other": copy(1)}, **{"eval.questions": 0})
    assert prompts.held_out == {}
    assert len(ids(first(prompts, 200, "one"))) == len(ids(first(prompts, 200, "other"))) == 10


def test_prompt_without_room_for_its_answer_is_refused(tokenizer: Any) -> None:
    refuse = {"rollout.overlong_prompts": "refuse"}
    assert build(tokenizer, length=8, **refuse).held_out  # 5 tokens and an answer of 3
    with pytest.raises(
        ConfigError, match=r"Question \d+ of copy3 has 5 tokens, but rollout.max_new_tokens leaves only 4"
    ) as caught:
        build(tokenizer, length=7, **refuse)
    assert caught.value.field == "rollout.overlong_prompts"
    with pytest.raises(ConfigError, match="only 0 distinct questions of up to 4 tokens"):
        build(tokenizer, length=7)


@pytest.fixture
def with_long(tmp_path: Path) -> dict[str, Any]:
    return questions_with_long_ones(tmp_path)


def test_too_long_questions_of_a_file_are_found_at_start(tokenizer: Any, with_long: dict) -> None:
    told: list[str] = []
    config = tiny_config(**with_long, **{"eval.questions": 3})
    prompts = Prompts(config, build_all(config), ChatTemplate(tokenizer), 8, told.append)
    text = "2 of the 12 questions of copy3 are longer than the 5 tokens that rollout.max_new_tokens leaves"
    assert [line.startswith(text) for line in told] == [True]
    assert [one.question["answer"] for one in prompts.held_out["copy3"]] == ["100", "101", "103"]
    epochs = [{one.question["answer"] for one in first(prompts, 7)} for _ in range(3)]
    assert epochs == [{str(100 + number) for number in range(4, 12) if number != 9}] * 3
    assert len(told) == 1
    assert prompts.figures() == {"prompts/overlong": 2.0}
    with pytest.raises(ConfigError, match=text):
        build(tokenizer, length=8, **with_long, **{"rollout.overlong_prompts": "refuse"})


def test_a_run_goes_on_behind_what_was_left_out(tokenizer: Any, with_long: dict) -> None:
    settings = {**with_long, "eval.questions": 0}
    whole = [one.question["answer"] for one in first(build(tokenizer, length=8, **settings), 40)]
    before = build(tokenizer, length=8, **settings)
    first(before, 17)
    after = build(tokenizer, length=8, **settings)
    after.go_on(before.cursor())
    assert [one.question["answer"] for one in first(after, 23)] == whole[17:]


def test_stop_tokens_are_those_of_config_and_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    assert stop_tokens(tmp_path, tokenizer) == [10]
    for written, expected in ((7, [7, 10]), ([9, 10, 2], [2, 9, 10]), (None, [10])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": written}))
        assert stop_tokens(tmp_path, tokenizer) == expected


def test_chat_template_can_be_replaced_and_must_exist(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{{ '<bos>' + messages[0]['content'] + '==' }}")
    prompts = build(load_tokenizer(model, str(own)))
    assert first(prompts, 1)[0].token_ids[-2:] == [11, 11]
    bare = tmp_path / "bare"
    bare.mkdir()
    for part in model.iterdir():
        if part.name != "chat_template.jinja":
            text = part.read_bytes()
            if part.name == "tokenizer_config.json":
                values = json.loads(text)
                values.pop("chat_template", None)
                text = json.dumps(values).encode()
            (bare / part.name).write_bytes(text)
    with pytest.raises(ConfigError, match="has no chat template: set the path of a jinja file"):
        load_tokenizer(bare, None)
