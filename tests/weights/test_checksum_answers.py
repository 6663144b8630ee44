"""Answers of /weights_checker, their comparison, and the hash of an engine on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import EngineError, WeightsError
from asyncrl.weights.checksum import CudaHash, differing, merge, parse

# --- answers ------------------------------------------------------------------------------------------------


def answer(*ranks: int) -> dict[str, Any]:
    return {
        "success": True,
        "ranks": [
            {"checksums": {"w": f"{rank:016x}"}, "parallelism_info": [{"role": "target", "tp_rank": rank}]}
            for rank in ranks
        ],
    }


def test_an_answer_is_read_in_the_order_of_ranks() -> None:
    assert parse(answer(1, 0)) == [{"w": "0" * 16}, {"w": "0" * 15 + "1"}]


def test_the_answers_of_replicas_are_one_if_they_agree() -> None:
    both = answer(0, 1)["ranks"] + answer(1, 0)["ranks"]
    assert parse({"ranks": both}) == parse(answer(0, 1))
    both[2]["checksums"] = {"w": "other"}
    with pytest.raises(EngineError, match="two sets of checksums for rank 1"):
        parse({"ranks": both})


def test_the_ranks_of_a_stage_follow_those_of_the_stage_before() -> None:
    ranks = answer(0, 1)["ranks"] + answer(0, 1)["ranks"]
    for number, rank in enumerate(ranks):
        rank["parallelism_info"] = [{"role": "target", "tp_rank": number % 2, "tp_size": 2, "pp_rank": 1 - number // 2}]
        rank["checksums"] = {"w": str(number)}
    assert [rank["w"] for rank in parse({"ranks": ranks})] == ["2", "3", "0", "1"]


@pytest.mark.parametrize("wrong", [answer(), {"success": False}, answer(1, 2), answer(1)])
def test_an_answer_without_every_rank_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="weights_checker"):
        parse(wrong)


def test_differences_and_gaps_are_named_once() -> None:
    same = {"a": "1", "b": "2"}
    assert differing([same, same], [same, dict(same)]) == []
    assert differing([same, same], [same, {"a": "1", "b": "3"}]) == ["b"]
    assert differing([same, {"a": "1"}], [{"b": "2"}, same]) == ["a", "b"]
    assert differing([same], [{**same, "visual.patch_embed.proj.weight": "3"}]) == []  # frozen, and not sent
    tower = {**same, "visual.patch_embed.proj.weight": "3"}  # trained, and sent
    assert differing([tower], [tower]) == []
    assert differing([tower], [{**tower, "visual.patch_embed.proj.weight": "4"}]) == ["visual.patch_embed.proj.weight"]
    assert differing([tower], [same]) == ["visual.patch_embed.proj.weight"]
    axes = "model.layers.0.self_attn.rotary_emb.axis_map"  # SGLang computes it
    assert differing([same], [{**same, axes: "3"}]) == []
    assert differing([same], [{**same, f"{axes}.other": "3"}]) == [f"{axes}.other"]
    with pytest.raises(WeightsError, match="1 ranks are expected, but the engine reported 2"):
        differing([same], [same, same])


def test_stages_are_joined_and_never_share_a_parameter() -> None:
    assert merge([[{"a": "1"}, {"a": "2"}], [{"b": "3"}, {"b": "4"}]]) == [{"a": "1", "b": "3"}, {"a": "2", "b": "4"}]
    with pytest.raises(WeightsError, match="a"):
        merge([[{"a": "1"}], [{"a": "1"}]])


# --- the GPU's hash -----------------------------------------------------------------------------------------

GOLDEN = {  # of SGLang 0.5.21's kernel, run by triton 3.9.0's interpreter
    "empty": (torch.empty(0), "0000000000000000"),
    "a part of a word": (torch.tensor([7], dtype=torch.uint8), "4a7b297fcc99a704"),
    "an odd count of bf16": (torch.arange(5, dtype=torch.bfloat16), "734f38267db36804"),
    "one tile": (torch.arange(8192, dtype=torch.int32), "0bed31c740a59498"),
    "one word more": (torch.arange(8193, dtype=torch.int32), "e6835e01e8adc30a"),
    "high bits": (-torch.arange(20001, dtype=torch.int16) * 3, "41f3bfae120816d0"),
    "several tiles": ((torch.arange(50000, dtype=torch.float32) * 0.5).view(100, 500), "8a10cc9ccf2a0a7c"),
}


def hashed(tensor: Tensor) -> str:
    whole = CudaHash()
    whole.update(tensor)
    return whole.hexdigest()


@pytest.mark.parametrize("case", GOLDEN)
def test_the_gpus_hash_is_the_kernels(case: str) -> None:
    tensor, expected = GOLDEN[case]
    assert hashed(tensor) == expected


@pytest.mark.parametrize("count", [1, 16383, 16385, 5_000_001])
def test_the_gpus_hash_does_not_depend_on_how_the_bytes_come(count: int) -> None:
    whole = (torch.arange(count) % 251).to(torch.uint8)
    pieces = CudaHash()
    for piece in whole.split(1_000_003):
        for half in piece.tensor_split([7, 40_001]):
            pieces.update(half)
    assert pieces.hexdigest() == hashed(whole)
    assert pieces.hexdigest() == hashed(whole), "the ranks that hold the same bytes answer with the same hash"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("count", [1, 5, 8192, 8193, 16_777_217, 100_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gpus_hash_is_what_sglang_computes_on_this_gpu(count: int, dtype: torch.dtype) -> None:
    from sglang.kernels.ops.memory.gpu_tensor_hash import gpu_tensor_hash

    tensor = torch.randn(count, device="cuda").to(dtype)
    assert hashed(tensor) == f"{gpu_tensor_hash(tensor):016x}"
