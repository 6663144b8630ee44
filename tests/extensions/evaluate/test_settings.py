"""What mode=evaluate refuses, runs and sends."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl import lookup
from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.manifest import Manifest
from asyncrl.errors import ConfigError
from asyncrl.extensions.evaluate.extension import ANSWERS, EvaluateLaunch, asked
from asyncrl.extensions.evaluate.program import Evaluator
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import imagined, place
from asyncrl.launch.plan import plan
from asyncrl.launch.prepare import Preparation
from asyncrl.launch.resume import advice
from asyncrl.models.catalog import resolve
from asyncrl.rollout.parts import ModelParts, PlayingParts
from asyncrl.schema import Completion, Prompt, Trajectory, Turn, VersionSpan
from asyncrl.tasks.build import build_all
from tests.fakes import addresses, tiny_config

EVALUATE = {"mode": "evaluate"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mode": "train", "evaluate": {"top_p": 0.9}}, r"evaluate\.top_p: .*mode=evaluate only"),
        ({**EVALUATE, "evaluate": {"top_k": 5}}, r"evaluate\.top_k: .*raise eval\.samples"),
        ({**EVALUATE, "eval.questions": 0}, r"eval\.questions: .*Nothing would be asked"),
        ({**EVALUATE, "resume": "/runs/other"}, r"resume: .*set auto"),
        ({**EVALUATE, "checkpoint.every": 2}, r"checkpoint\.every: .*mode=evaluate trains nothing"),
        (
            {**EVALUATE, "evaluate": {"adapter": "/a"}, "engine.urls": ["http://h:1"]},
            r"evaluate\.adapter: .*their own model",
        ),
    ],
)
def test_settings_without_an_effect_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        tiny_config(**changes)


def test_engines_and_the_program_run_and_no_trainer() -> None:
    config = tiny_config(**EVALUATE)
    placement = place(config, imagined(config, 1, 0))
    specs = plan(config, replace(addresses(), **placement.urls()), placement, Path("/runs/r"))
    assert [spec.name for spec in specs] == ["engine-0", "router", "rollout"]
    assert specs[-1].ends_the_run
    assert specs[-1].argv[1:3] == ["-m", "asyncrl.extensions.evaluate.program"]


def test_stopped_evaluation_says_that_it_goes_on(tmp_path: Path) -> None:
    text = advice(tmp_path, ["mode=evaluate"], tiny_config(**EVALUATE))
    assert text == (
        f"; what it has done so far is kept. To go on: asyncrl-train mode=evaluate run.dir={tmp_path} resume=auto"
    )
    assert "starts over" in advice(tmp_path, [], tiny_config())


@pytest.mark.parametrize("mode", ["evaluate", "train"])
def test_requests_carry_what_cuts_the_distribution(mode: str) -> None:
    """Only in this mode: the trainer would not know of it."""
    config = tiny_config(mode="evaluate", **{"eval.samples": 2}, evaluate={"top_p": 0.9, "top_k": 20})
    (hooks,) = (one.player(config, addresses()) for name, one in lookup.active(config).items() if name == "evaluate")
    assert hooks.sampling(config.model_copy(update={"mode": mode})) == (
        {"top_p": 0.9, "top_k": 20} if mode == "evaluate" else {}
    )
    where = addresses(model=resolve(config.model.path))
    playing = PlayingParts.build(
        config, where, ModelParts.load(config, where.model), build_all(config), lambda *_: None
    )
    sent = playing.client._settings.sampling
    assert (sent["top_p"], sent["top_k"]) == (0.9, 20)


def test_answers_under_other_settings_are_not_gone_on_with(tmp_path: Path) -> None:
    then = tiny_config(**EVALUATE, resume="auto", **{"eval.samples": 4})
    lines = [{"settings": asked(then)}, {"set": "copy3"}, {"set": "copy3"}]
    (tmp_path / ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def notes(config: Any) -> list[str]:
        prepared: Any = SimpleNamespace(config=config, run_dir=tmp_path)
        EvaluateLaunch().refuse(prepared)
        return EvaluateLaunch().notes(prepared)

    assert notes(then) == ["2 questions are answered already"]
    other = tiny_config(**EVALUATE, resume="auto", **{"eval.samples": 8})
    with pytest.raises(ConfigError, match=r"eval: .*answers\.jsonl in run\.dir was written with .*'samples': 4"):
        notes(other)
    assert notes(tiny_config(**EVALUATE, **{"eval.samples": 8})) == []  # a fresh run, whose folder is emptied


def test_engines_load_the_model_with_the_adapter_in_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = pytest.importorskip("asyncrl.extensions.convert.adapters")
    merged: list[tuple[Path, ...]] = []

    def merge(base: Path, adapter: Path, out: Path, *, limit: int) -> None:
        merged.append((base, adapter))
        out.mkdir()

    monkeypatch.setattr(convert, "merge", merge)
    config = tiny_config(**EVALUATE, evaluate={"adapter": "/runs/a/hf"})
    for _ in range(2):  # a resumed run has the merged model already
        prepared: Any = SimpleNamespace(config=config, run_dir=tmp_path, folders={"model": Path("/models/base")})
        EvaluateLaunch().begins(prepared)
        assert prepared.folders == {"model": tmp_path / "merged-model"}
    assert merged == [(Path("/models/base"), Path("/runs/a/hf"))]
    monkeypatch.setitem(sys.modules, "asyncrl.extensions.convert.adapters", None)
    with pytest.raises(ConfigError, match=r"evaluate\.adapter: .*needs the extension `convert`"):
        EvaluateLaunch().begins(prepared)


def test_engines_load_the_checkpoint_that_is_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run names the model with the config and the tokenizer. Other modes know no checkpoints as models."""
    convert = pytest.importorskip("asyncrl.extensions.convert.adapters")
    made: list[tuple[Path, Path | None]] = []

    def to_hf(source: Path, out: Path, *, model: Path, dtype: None, limit: int) -> None:
        made.append((source, model))
        out.mkdir()

    monkeypatch.setattr(convert, "checkpoint_to_hf", to_hf)
    folder = tmp_path / "trained" / "checkpoints" / "00000040"
    folder.mkdir(parents=True)
    base = resolve("builtin:tiny")
    then = {"model": {"path": "builtin:tiny"}}
    manifest.commit(folder, Manifest(manifest.FORMAT, 40, "trained", 0.0, then, {}))

    def preparation(**changes: Any) -> Preparation:
        config = tiny_config(**{"model.path": str(folder), "run.dir": str(tmp_path / "run"), **changes})
        return Preparation(config, tmp_path / "run", Cluster(config))

    prepared = preparation(**EVALUATE)
    (tmp_path / "run").mkdir()
    prepared.find("model")
    assert prepared.folders == {"model": base}
    for _ in range(2):  # a resumed run has the model already
        prepared.folders["model"] = base
        EvaluateLaunch().begins(prepared)
        assert prepared.folders == {"model": tmp_path / "run" / "merged-model"}
    assert made == [(folder, base)]
    with pytest.raises(ConfigError, match=r"evaluate\.adapter: .*model\.path is a checkpoint, which has all"):
        preparation(**EVALUATE, evaluate={"adapter": "/a"})
    with pytest.raises(ConfigError, match=r"model\.path: .*have their own model"):
        preparation(**EVALUATE, **{"engine.urls": ["http://h:1"]})
    with pytest.raises(ConfigError, match=r"model\.path: got .*Give a folder with config\.json"):
        preparation().find("model")


def test_repeated_question_is_asked_that_often(tmp_path: Path) -> None:
    prompts = [Prompt(str(number), [1], {"messages": ["the same"]}, "copy3", number) for number in range(2)]
    asked_for: list[int] = []

    async def ask(prompt: Prompt) -> list[Trajectory]:
        asked_for.append(prompt.index)
        turn = Turn([], Completion([1], [0.0], [VersionSpan(0, 0, 1)], "stop"))
        return [Trajectory([turn], 2.0 * prompt.index)]

    task = SimpleNamespace(correct=lambda reward: reward >= 2.0)
    parts: Any = SimpleNamespace(
        run=SimpleNamespace(config=tiny_config(**EVALUATE), run_dir=tmp_path),
        evaluations=SimpleNamespace(sets={"copy3": prompts}, ask=ask, tasks={"copy3": task}),
        model=SimpleNamespace(template=SimpleNamespace(decode=str)),
        server=SimpleNamespace(starting=""),
    )
    for _ in range(2):  # the second process has the answers of the first
        evaluator = Evaluator(parts)
        assert asyncio.run(evaluator.ask_all())
        found = evaluator.results()["sets"]["copy3"]
        assert [(one["index"], one["greedy"]["correct"]) for one in found["questions"]] == [(0, False), (1, True)]
        assert found["figures"]["accuracy"]["value"] == 0.5
    assert sorted(asked_for) == [0, 1]
