"""An evaluation asks every question once: whatever dies, and if it is killed and resumed. Over stub engines it is the
command and its program; the real engine shows that what cuts the distribution arrives."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.plan.lengths import Lengths
from tests.integration.ranks import ROOT
from tests.integration.running import evidence, finish, lines, nothing_is_left, output, processes_of, start, wait_until
from tests.integration.workload import Workload

pytestmark = pytest.mark.integration

QUESTIONS, SAMPLES = 24, 2
EVALUATE = [
    "mode=evaluate",
    f"eval.questions={QUESTIONS}",
    f"eval.samples={SAMPLES}",
    "eval.max_running=2",
    "engine.count=2",
    "rollout.max_new_tokens=8",
    "resume=auto",
]
STUBS = Workload(
    asdict(Lengths(mean=5.0, sigma=0.5, longest=8, group_size=3)),
    per_token=0.03,
    start_after=[0.0, 0.0],
    train_seconds=0,
)


def answers(run_dir: Path) -> list[dict[str, Any]]:
    return lines(run_dir / "answers.jsonl")[1:]


def test_killed_evaluation_goes_on_and_asks_every_question_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in STUBS.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    run_dir, stubs = tmp_path / "run", "tests.integration.stub_run"
    own = [*EVALUATE, "cluster.tls=false", "weights.timeout=5"]
    with start(run_dir, *own, module=stubs) as launcher:
        wait_until(lambda: len(answers(run_dir)) >= 5, launcher, run_dir, "five answers")
        launcher.kill()  # its children die with it
        launcher.wait()
    before = answers(run_dir)
    with (run_dir / "answers.jsonl").open("a") as file:
        file.write('{"set": "copy3", "quest')  # as if it had been killed while it wrote
    with start(run_dir, *own, module=stubs) as launcher:
        wait_until(lambda: len(answers(run_dir)) >= len(before) + 3, launcher, run_dir, "three more")
        os.kill(processes_of(launcher, run_dir)["engine-1"], signal.SIGKILL)
        code, text = finish(launcher, run_dir)
    assert code == 0, evidence(run_dir)
    assert f"{len(before)} questions are answered already" in text
    assert answers(run_dir)[: len(before)] == before
    assert set(Counter(one["question"] for one in answers(run_dir)).values()) == {1}
    results = json.loads((run_dir / "results.json").read_text())["sets"]["copy3"]
    assert [one["index"] for one in results["questions"]] == sorted(one["index"] for one in answers(run_dir))
    assert {len(one["samples"]) for one in results["questions"]} == {SAMPLES}
    assert results["figures"]["accuracy"]["questions"] == QUESTIONS
    assert results["failed"] == 0
    nothing_is_left(run_dir)
    with start(run_dir, *own, module=stubs) as launcher:  # once more: nothing is asked
        assert finish(launcher, run_dir)[0] == 0
    assert "is complete: every question was asked" in output(run_dir)


def test_most_probable_token_alone_is_what_greedy_decoding_takes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, *EVALUATE, "engine.count=1", "evaluate.top_k=1", "rollout.max_new_tokens=3") as launcher:
        code, text = finish(launcher, run_dir)
    assert code == 0, evidence(run_dir)
    assert "nothing is trained" in text
    for one in answers(run_dir):
        assert [sample["answer"] for sample in one["samples"]] == [one["greedy"]["answer"]] * SAMPLES
    figures = json.loads((run_dir / "results.json").read_text())["sets"]["copy3"]["figures"]
    assert figures["mean"] == figures["accuracy"] == figures["pass@2"]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["copy3/accuracy"].endswith(f"of {QUESTIONS}")
    nothing_is_left(run_dir)


@pytest.mark.parametrize("given", ["adapter", "checkpoint"])
def test_what_was_trained_answers_as_it_was_trained(given: str, tmp_path: Path) -> None:
    """An adapter's export is merged into the model that the engines load, and a checkpoint becomes one as by
    asyncrl-convert to-hf."""
    pytest.importorskip("asyncrl.extensions.convert")
    pytest.importorskip("asyncrl.extensions.sft")
    row = '{{"messages": "{number:03}", "completion": "777"}}\n'
    (tmp_path / "rows.jsonl").write_text("".join(row.format(number=number) for number in range(64)))
    how = ["trainer.lora.rank=8", "trainer.optimizer.lr=1e-2"]
    trained = [
        *(how if given == "adapter" else ["checkpoint.every=60", "trainer.optimizer.lr=1e-3"]),
        "model=tiny",
        f"task.train_file={tmp_path / 'rows.jsonl'}",
        "rollout.batch_groups=16",
        "eval.questions=0",
        "trainer.dtype=float32",
        "run.max_steps=60",
    ]
    with start(tmp_path / "trained", *trained, experiment="warmup") as launcher:
        assert finish(launcher, tmp_path / "trained")[0] == 0, evidence(tmp_path / "trained")
    run_dir = tmp_path / "run"
    checkpoint = tmp_path / "trained" / "checkpoints" / "00000060"
    model = f"evaluate.adapter={tmp_path / 'trained' / 'hf'}" if given == "adapter" else f"model.path={checkpoint}"
    with start(run_dir, *EVALUATE, "engine.count=1", "rollout.max_new_tokens=3", model) as launcher:
        assert finish(launcher, run_dir)[0] == 0, evidence(run_dir)
    assert {one["greedy"]["answer"] for one in answers(run_dir)} == {"777"}
    made = run_dir / "merged-model"
    assert json.loads((run_dir / "addresses.json").read_text())["model"] == str(made)
    if given == "checkpoint":
        from asyncrl.extensions.convert.cli import main

        assert main(["to-hf", str(checkpoint), str(tmp_path / "converted")]) == 0
        files = {file.name: file.read_bytes() for file in (tmp_path / "converted").iterdir()}
        assert {file.name: file.read_bytes() for file in made.iterdir()} == files
    nothing_is_left(run_dir)
