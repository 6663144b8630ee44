"""Prompts and their order are the same wherever they are rendered."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import Raw

from asyncrl.agents.template import ChatTemplate
from asyncrl.extensions.processes.rendering import CHUNK, RenderedAhead
from asyncrl.extensions.processes.wire import RenderedQuestion
from asyncrl.models.catalog import resolve
from asyncrl.rollout import prompts as module
from asyncrl.rollout.parts import load_tokenizer
from asyncrl.rollout.prompts import Prompts
from asyncrl.schema import Prompt, encode
from asyncrl.tasks.build import build_all
from tests.fakes import questions_with_long_ones, tiny_config


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve("builtin:tiny"), None)


@pytest.fixture
def with_long(tmp_path: Path) -> dict[str, Any]:
    return questions_with_long_ones(tmp_path)


def first(prompts: Prompts, count: int, task: str = "copy3") -> list[Prompt]:
    return list(itertools.islice(prompts.training[task], count))


class _Elsewhere:
    """Processes that render: with `share` of 1 at once, else some of it later or never."""

    def __init__(self, config: Any, template: ChatTemplate, share: float, seed: int = 0) -> None:
        self.ahead = RenderedAhead(self._render, config.rollout.batch_groups)
        self._tasks, self._template, self._share, self._chance = build_all(config), template, share, Random(seed)
        self._config, self._late = config, list[RenderedQuestion]()

    def _render(self, questions: list[tuple[str, int]]) -> None:
        for name, index in questions:
            made = module.question_of(self._tasks[name], self._template, index, self._config.field_of(name))
            data = Raw(encode(module.render(self._template, made)))
            self._late.append(RenderedQuestion(name, index, data))
        self._chance.shuffle(self._late)
        self.ahead.came([self._late.pop() for _ in range(int(self._share * len(self._late)))])


class FewSeeds:
    """Questions of one text, with 30 seeds."""

    inline, size = True, None

    def question(self, index: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "1"}], "seed": index % 30}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        return 0.0

    def correct(self, reward: float) -> bool:
        return False


SETS: list[dict[str, Any]] = [
    {"task.params": {"digits": 1}, "eval.questions": 4},  # some are held out
    {"task.params": {"digits": 3}, "eval.questions": 0},
    {"task.kind": f"{__name__}:FewSeeds", "task.params": {}, "eval.questions": 20},
]


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("number", range(len(SETS) + 1))
def test_prompts_are_the_same_wherever_they_are_rendered(
    tokenizer: Any, with_long: dict, number: int, share: float
) -> None:
    """In the same order, without those that are held out or too long, and past a checkpoint."""
    file = {**with_long, "eval.questions": 3}
    config, template = tiny_config(**[*SETS, file][number]), ChatTemplate(tokenizer)

    def made(ahead: RenderedAhead | None) -> Prompts:
        length = 8 if number == len(SETS) else 64
        return Prompts(config, build_all(config), template, length, ahead=ahead)

    def name(prompt: Prompt) -> Any:
        return prompt.uid, prompt.token_ids, prompt.task, prompt.index

    expected, before, after = (made(None), *(made(_Elsewhere(config, template, share).ahead) for _ in range(2)))
    found = first(before, 400)
    after.go_on(before.cursor())
    assert list(map(name, [*found, *first(after, 300)])) == list(map(name, first(expected, 700)))


def test_prompts_that_came_are_not_rendered_here(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are they kept once they are drawn."""
    config, template = tiny_config(**SETS[1]), ChatTemplate(tokenizer)
    ahead = _Elsewhere(config, template, 1.0).ahead
    prompts = Prompts(config, build_all(config), template, 64, ahead=ahead)
    first(prompts, 1)
    rendered: list[str] = []
    render = prompts._render
    monkeypatch.setattr(prompts, "_render", lambda uid, *rest: rendered.append(uid) or render(uid, *rest))
    first(prompts, 2000)
    assert len(rendered) < CHUNK
    assert len(ahead._asked) <= ahead.most
    assert len(ahead._came) <= ahead.most
