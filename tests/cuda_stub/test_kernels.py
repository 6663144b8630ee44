"""Every kernel of attention that a shipped experiment needs compiles for the GPUs that people have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.cuda_stub.kernels import GPUS, compile_expert_bias, compile_packs

SHAPES = {
    "qwen3_8b": (32, 8, 128, 128),
    "qwen3_8b, tensor parallel": (16, 4, 128, 128),
    "llama3_70b": (8, 1, 128, 128),  # of a rank
    "qwen3_30b_a3b": (16, 2, 128, 128),
    "qwen3_235b_a22b": (16, 1, 128, 128),
    "smollm2": (9, 3, 64, 64),
    "tiny": (4, 4, 16, 16),
    "latent attention": (16, 16, 192, 128),
}
"""Query heads, key heads, and the widths of a key and a value, on one rank."""
WINDOWED = {
    "gpt_oss_20b": ((64, 8, 64, 64), (None, 128), True),
    "gpt_oss_20b, tensor parallel": ((16, 2, 64, 64), (None, 128), True),
    "olmo3_7b": ((32, 32, 128, 128), (None, 4096), False),
    "gemma3_12b": ((16, 8, 256, 256), (None, 1024), False),
}
"""The same, the windows of a model's layers, and whether they have sinks."""
LENGTHS = (17, 88, 127, 129, 700, 1000, 9000, 131_072)
GRAPHS = 4
"""The most graphs that all lengths need together."""


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_compiles_for_any_length_with_few_graphs(shape: str, gpu: str, apart: Callable[..., Any]) -> None:
    told = apart(compile_packs, gpu, SHAPES[shape], LENGTHS)
    made = [kernel for one in told for kernel in one["kernels"]]
    assert set(made) == {gpu}
    assert len(told[0]["kernels"]) >= 3, "forward, the workspace of backward, backward"
    assert told[-1]["graphs"] <= GRAPHS, told


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_and_sinks_compile_with_few_graphs(name: str, gpu: str, apart: Callable[..., Any]) -> None:
    shape, windows, sinks = WINDOWED[name]
    told = apart(partial(compile_packs, windows=windows, sinks=sinks), gpu, shape, LENGTHS)
    made = [kernel for one in told for kernel in one["kernels"]]
    assert set(made) == {gpu}
    assert len(told[0]["kernels"]) >= 3 * len(windows), "forward, the workspace of backward, backward, for each window"
    assert told[-1]["graphs"] <= GRAPHS * len(windows), told


def test_offloaded_attention_compiles_to_the_same_graphs(apart: Callable[..., Any]) -> None:
    shape, lengths = SHAPES["qwen3_8b"], LENGTHS[:6]
    without = apart(compile_packs, "sm_90", shape, lengths)
    told = apart(partial(compile_packs, offload=True), "sm_90", shape, lengths)
    assert told[-1]["moved"] >= 5 * len(lengths), "queries, keys, values, the result and its normalizer"
    assert [one["graphs"] for one in told] == [one["graphs"] for one in without]


@pytest.mark.parametrize("gpu", GPUS)
def test_the_routers_count_compiles(gpu: str, apart: Callable[..., Any]) -> None:
    assert set(apart(compile_expert_bias, gpu, LENGTHS)) == {gpu}
