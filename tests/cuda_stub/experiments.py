"""The shipped experiments, each with a small model of its architecture."""

from __future__ import annotations

from asyncrl.launch.help import further_confs
from asyncrl.launch.main import CONF
from tests.cuda_stub.step import Case

TINY = ("tiny", "tiny_game", "forking", "gigpo", "guided", "memory", "self_play")
SIZED = {
    "llama3_70b": Case("llama", layers=5),
    "llama3_70b_lora": Case("llama"),
    "qwen3_8b": Case("qwen3"),
    "qwen3_8b_lora": Case("qwen3"),
    "qwen3_32b_qlora": Case("qwen3"),
    "qwen2_5_vl_7b": Case("qwen3"),  # the text side alone, in the experiment's layout
    "qwen3_vl_8b": Case("qwen3"),
    "qwen3_30b_a3b": Case("qwen3_moe", fields={"num_experts": 16, "num_experts_per_tok": 4}),
    "qwen3_235b_a22b": Case("qwen3_moe", layers=2, fields={"num_experts": 128, "num_experts_per_tok": 8}),
}
"""Experiments that are sized for GPUs: their layouts need these layers and experts."""


def _case(name: str) -> Case:
    from dataclasses import replace

    one = SIZED.get(name) or Case("llama" if name in TINY else "tied llama")
    return replace(one, experiment=name)


ROWS = {"warmup"}
"""Experiments of mode=sft, whose trainer reads rows with a tokenizer; these models have none."""
FILES = [file for conf in (CONF, *further_confs()) for file in (conf / "experiment").glob("*.yaml")]
NAMES = sorted({file.stem for file in FILES} - ROWS)
EXPERIMENTS = {name: _case(name) for name in NAMES}
