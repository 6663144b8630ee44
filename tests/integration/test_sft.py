"""Supervised training is what transformers computes, in every layout, and a run that is killed goes on to the bit."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.models.tiny import write
from tests.fakes import changed, compose_values
from tests.integration.losses import joined
from tests.integration.ranks import run_ranks
from tests.integration.running import evidence, finish, lines, run, start, wait_for_step

pytestmark = pytest.mark.integration

CLOSE = 2e-6  # transformers computes norms, rotations and the loss in float32, whatever the dtype of the model
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"single": {}, "unshared": {"share_prompts": False}, "parts": {"batch_parts": 2, "micro_batch_tokens": 48}},
    2: {"tp2": {"tensor_parallel": 2}, "pp2": {"pipeline_parallel": 2}, "dp2": {"data_parallel": 2}},
}
"""Layouts as settings of the trainer, by number of processes."""
BATCH, HELD, ROWS, STEPS = 6, 4, 22, 12
"""Two epochs of 18 rows are six steps; the run makes twelve, of four epochs."""


def conversations(folder: Path, count: int) -> list[list[dict[str, str]]]:
    """Write rows with the same prompt, several turns and plain pairs, and return them as conversations."""
    draw, found = random.Random(5), []

    def digits(most: int) -> str:
        return "".join(draw.choice("0123456789") for _ in range(draw.randint(1, most)))

    same, rows = digits(6), list[dict[str, Any]]()
    for number in range(count):
        said = [same if number % 3 == 0 else digits(6), digits(4)] + ([digits(3), digits(5)] if number % 4 == 1 else [])
        chat = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
        rows.append({"messages": chat} if number % 2 else {"messages": chat[:-1], "completion": chat[-1]["content"]})
        found.append(chat)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, rows and the settings of a run."""
    made = tmp_path_factory.mktemp("sft")
    write(made / "model")
    conversations(made, BATCH)
    values = changed(
        compose_values("experiment=warmup", "model=tiny"),
        {
            "task.train_file": str(made / "rows.jsonl"),
            "eval.questions": 0,
            "rollout.batch_groups": BATCH,
            "run.dir": str(made),
        },
    )
    (made / "config.json").write_text(json.dumps(values))
    return made


@pytest.fixture(scope="module")
def outcome(folder: Path) -> Any:
    """Return figures and gradients of a layout, with one launch per number of processes."""

    @cache
    def launch(ranks: int) -> Any:
        return joined(run_ranks("sft:one_batch", folder, LAYOUTS, world=ranks))

    return lambda layout: launch(next(ranks for ranks, layouts in LAYOUTS.items() if layout in layouts))[layout]


@cache
def of_transformers(folder: Path) -> tuple[float, dict[str, Tensor], int]:
    """Return loss and gradients of transformers' own loss, and the number of trained tokens, one row at a time: labels
    are the tokens that the template adds with a message of the assistant."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    batch = []
    for chat in conversations(folder, BATCH):
        ids: list[int] = tokenizer.apply_chat_template(chat, return_dict=False)
        labels = [-100] * len(ids)
        for place, message in enumerate(chat):
            if message["role"] == "assistant":
                begin = len(tokenizer.apply_chat_template(chat[:place], add_generation_prompt=True, return_dict=False))
                end = len(tokenizer.apply_chat_template(chat[: place + 1], return_dict=False))
                labels[begin:end] = ids[begin:end]
        batch.append((torch.tensor([ids]), torch.tensor([labels])))
    count = sum(int((labels != -100).sum()) for _, labels in batch)
    loss = sum(model(input_ids=ids, labels=labels, num_items_in_batch=count).loss for ids, labels in batch)
    loss.backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return loss.item(), gradients, count


@pytest.mark.parametrize("layout", [layout for layouts in LAYOUTS.values() for layout in layouts])
def test_loss_and_gradients_are_those_of_transformers(folder: Path, outcome: Any, layout: str) -> None:
    loss, gradients, count = of_transformers(folder)
    figures, found = outcome(layout)
    assert figures["loss"] == pytest.approx(loss, abs=CLOSE)
    assert figures["tokens/trained"] == count
    assert not [name for name in figures if name.startswith("logprob_gap/")]  # it would be the loss itself
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=0, atol=CLOSE, msg=lambda text, name=name: f"{name} {text}"
        )


def test_beginnings_are_shared_between_rows(outcome: Any) -> None:
    shared, apart = outcome("single")[0], outcome("unshared")[0]
    assert shared["tokens/packed"] < apart["tokens/packed"]
    assert shared["tokens/shared"] > 0.1 > apart["tokens/shared"] == 0.0


def settings(folder: Path) -> list[str]:
    """Return the settings of a run of some seconds."""
    conversations(folder, ROWS)
    return [
        "model=tiny",
        f"task.train_file={folder / 'rows.jsonl'}",
        f"rollout.batch_groups={BATCH}",
        f"eval.questions={HELD}",
        "eval.every=4",
        "trainer.dtype=float32",
        "trainer.optimizer.lr=1e-3",
        "trainer.optimizer.schedule=cosine",
        "trainer.optimizer.decay_steps=40",
        "sft.epochs=4",
        "checkpoint.every=5",
        "resume=auto",
        "run.max_steps=40",
    ]


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return what must be equal in two runs, which excludes times."""
    kept = ("step", "loss", "grad_norm", "lr", "tokens/trained", "sft/epoch", "sft/held_out", "sft/held_out/before")
    return [{name: line[name] for name in kept if name in line} for line in lines(run_dir / "metrics.jsonl")]


def trained(run_dir: Path) -> dict[str, Tensor]:
    return {name: one for file in (run_dir / "hf").glob("*.safetensors") for name, one in load_file(file).items()}


def test_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    own = settings(tmp_path)
    for name in ("whole", "killed"):
        with start(tmp_path / name, *own, experiment="warmup") as launcher:
            if name == "killed":
                wait_for_step(launcher, tmp_path / name, 7)
                launcher.kill()  # its children die with it
                launcher.wait()
                continue
            assert finish(launcher, tmp_path / name)[0] == 0, evidence(tmp_path / name)
    with start(tmp_path / "killed", *own, experiment="warmup") as launcher:
        assert finish(launcher, tmp_path / "killed")[0] == 0, evidence(tmp_path / "killed")
    whole = steps(tmp_path / "whole")
    assert [line["step"] for line in whole] == list(range(1, STEPS + 1))
    assert [line["sft/epoch"] for line in whole] == [pytest.approx(BATCH * step / 18) for step in range(1, STEPS + 1)]
    assert [line["step"] for line in whole if "sft/held_out" in line] == [4, 8, 12]
    assert [line["step"] for line in whole if "sft/held_out/before" in line] == [1]
    assert whole[-1]["sft/held_out"] < whole[0]["sft/held_out/before"]
    assert not [name for line in lines(tmp_path / "whole" / "metrics.jsonl") for name in line if "gap" in name]
    assert whole[-1]["loss"] < 0.8 * whole[0]["loss"]
    assert steps(tmp_path / "killed") == whole
    after, before = trained(tmp_path / "killed"), trained(tmp_path / "whole")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert after.keys() == before.keys()


def test_run_goes_on_in_another_layout_with_the_same_rows(tmp_path: Path) -> None:
    own, run_dir = settings(tmp_path), tmp_path / "run"
    with start(run_dir, *own, "run.max_steps=7", experiment="warmup") as launcher:
        assert finish(launcher, run_dir)[0] == 0, evidence(run_dir)
    with start(run_dir, *own, "rollout.batch_groups=5", experiment="warmup") as launcher:
        code, text = finish(launcher, run_dir)
    assert code == 1
    assert "rollout.batch_groups was 6, and is 5" in text
    with start(run_dir, *own, "trainer.data_parallel=2", experiment="warmup") as launcher:
        assert finish(launcher, run_dir)[0] == 0, evidence(run_dir)
    assert [line["step"] for line in steps(run_dir)] == list(range(1, STEPS + 1))
    assert sum(line["samples/generated"] for line in lines(run_dir / "metrics.jsonl")) == 4 * (ROWS - HELD)
    alone = tmp_path / "alone"
    with start(alone, *own, experiment="warmup") as launcher:
        assert finish(launcher, alone)[0] == 0, evidence(alone)
    for one, other in zip(steps(run_dir), steps(alone), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_adapters_are_trained_and_exported(tmp_path: Path) -> None:
    own, run_dir = settings(tmp_path), tmp_path / "run"
    with start(run_dir, *own, "trainer.lora.rank=4", "run.max_steps=8", experiment="warmup") as launcher:
        assert finish(launcher, run_dir)[0] == 0, evidence(run_dir)
    assert (run_dir / "hf" / "adapter_config.json").is_file()
    assert steps(run_dir)[-1]["sft/held_out"] < steps(run_dir)[3]["sft/held_out"]


def test_right_answers_of_a_recording_are_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of the README: engines alone, their better answers as rows, and the reward before and after."""
    for name in ("collect", "evaluate", "view"):
        pytest.importorskip(f"asyncrl.extensions.{name}")
    from asyncrl.extensions.view.inspection.cli import main

    small = ["mode=rollout_only", "record=true", "run.max_steps=12", "eval.questions=8"]
    before = run(tmp_path / "S", *small)
    assert main([str(tmp_path / "S"), "--reward", "0.3:", "--rows"]) == 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text(capsys.readouterr().out)
    own = ["model=tiny", f"task.train_file={rows}", "eval.questions=32", "sft.epochs=3"]
    float32 = ["trainer.dtype=float32", "trainer.optimizer.lr=1e-3"]
    losses = run(tmp_path / "B", *own, *float32, experiment="warmup")
    assert losses[-1]["sft/held_out"] < losses[0]["sft/held_out/before"]
    asked = ["mode=evaluate", "eval.questions=100", "eval.samples=4", f"model.path={tmp_path / 'B' / 'hf'}"]
    with start(tmp_path / "E", *asked) as launcher:
        assert finish(launcher, tmp_path / "E")[0] == 0, evidence(tmp_path / "E")
    after = json.loads((tmp_path / "E" / "results.json").read_text())["sets"]["copy3"]["figures"]["reward/mean"]
    assert after["low"] > max(step["reward/mean"] for step in before)
