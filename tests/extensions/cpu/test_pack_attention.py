"""Attention over packs on CPUs; tests/trainer/test_gpu.py holds its values against a dense mask."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from asyncrl.algo.pack import pack
from asyncrl.algo.samples import Sample
from asyncrl.extensions.cpu.pack_attention import plan
from tests.algo.packs import words

ROOT = Path(__file__).parents[3]


def test_bfloat16_attention_works_where_avx512_is_hidden() -> None:
    """On a CPU with AVX-512; others are what the variable makes of it."""
    case = ["tests/trainer/test_gpu.py", "-k", "1-600-grouped-dtype1-cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *case],
        cwd=ROOT,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in done.stdout, done.stdout


def test_calls_are_few_and_cover_every_pair_once() -> None:
    rng = random.Random(0)
    head = words(rng, 40)
    groups = []
    for g in range(20):
        prompt = [*head, g, *words(rng, 9)]
        groups.append([sample(prompt, [s, *words(rng, 3)]) for s in range(8)])
    p = pack(groups)
    calls = plan(p)
    assert len(calls.own) + len(calls.above) <= 5  # beginning, prompts, answers; answers on prompts, all on beginning
    assert sum(len(call.rows) if call.alone is None else call.alone.queries[1] for call in calls.own) == p.num_tokens


def sample(prompt: list[int], tokens: list[int]) -> Sample:
    return Sample(prompt, tokens, [True] * len(tokens), 0, 0)
