"""Tests of a teacher on real engines: a teacher equal to the policy changes nothing; another is learnt from, even if
its engine dies."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from statistics import fmean

import pytest

from asyncrl.models import catalog
from asyncrl.models.tiny import BOS, EOS, MAX_POSITIONS, PAD, TOKENS, write_random_model
from tests.integration.running import finish, lines, nothing_is_left, processes_of, run, start, wait_for_step

pytestmark = pytest.mark.integration

PURE = [
    "algo.advantage=none",
    "+distill.coefficient=1",
    "algo.entropy_bonus=0",
    "eval.questions=0",
    "teacher=sglang",
    "teacher.dtype=float32",
    "teacher.max_total_tokens=8192",
]


def another_tiny_model(folder: Path) -> Path:
    """Write a model with random weights of another seed and a wide distribution. The tokenizer is the tiny model's."""
    write_random_model(
        folder,
        "llama",
        vocab=len(TOKENS),
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=4,
        intermediate=256,
        tied=False,
        seed=7,
        dtype="float32",
        max_positions=MAX_POSITIONS,
        bos_eos_pad=(TOKENS.index(BOS), TOKENS.index(EOS), TOKENS.index(PAD)),
        spread=0.15,
    )
    for file in catalog.resolve("builtin:tiny").glob("*token*"):
        shutil.copy(file, folder)
    return folder


def test_teacher_that_is_the_policy_gives_no_advantage(tmp_path: Path) -> None:
    """The advantage vanishes up to the gap between engine and trainer, which the generating engine shows in the same
    step."""
    only = ["run.max_steps=1", "rollout.max_staleness=0", "algo.kl.reference=teacher", "algo.kl.measure_every=1"]
    step = run(tmp_path / "run", *PURE, *only)[0]
    assert step["kl/teacher"] < 1e-9
    assert step["kl/teacher"] <= 2 * step["logprob_gap/kl"] + 1e-12
    assert abs(step["teacher/gap"]) < 1e-5
    assert step["kl/reference"] == step["kl/teacher"]
    assert step["grad_norm"] < 1e-4
    assert step["groups/trained"] == 16  # no reward, and all of them run
    assert step["tokens/trained"] < step["teacher/tokens"]


def test_another_teacher_is_learnt_despite_a_killed_engine(tmp_path: Path) -> None:
    teacher = another_tiny_model(tmp_path / "teacher")
    shape = ["run.max_steps=30", "rollout.max_new_tokens=8", "trainer.optimizer.lr=3e-3", "rollout.group_size=8"]
    with start(tmp_path / "run", *PURE, f"teacher.model={teacher}", *shape) as process:
        wait_for_step(process, tmp_path / "run", 6)
        os.kill(processes_of(process, tmp_path / "run")["teacher-0"], signal.SIGKILL)
        code, text = finish(process, tmp_path / "run")
    assert code == 0, text
    assert "teacher-0 died (killed by SIGKILL" in text
    steps = lines(tmp_path / "run" / "metrics.jsonl")
    # steps scatter by 6 % around a mean that falls by 1.3 % each: the difference is six times its own deviation
    first, last = (fmean(step["kl/teacher"] for step in some) for some in (steps[:5], steps[-5:]))
    assert last < 0.9 * first, (first, last)
    assert sum(step["teacher/retried"] for step in steps) > 0
    assert steps[-1]["groups/rejected"] == 0  # they waited for it
    nothing_is_left(tmp_path / "run")
