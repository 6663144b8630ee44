"""Loading and exporting on one rank, with hand-made modules in Megatron's place: numbering, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl import lookup
from asyncrl.errors import WeightsError
from asyncrl.parallel import Parallel
from asyncrl.weights.layouts import Dims
from asyncrl.weights.loading import load
from asyncrl.weights.mapping import Mapping
from asyncrl.weights.reshard import Resharder

H, FF, VOCAB, LAYERS = 4, 6, 5, 2
DIMS = Dims(heads=4, kv_heads=2, head_dim=2, vocab=VOCAB, tied=False)
TIED = Dims(heads=4, kv_heads=2, head_dim=2, vocab=VOCAB, tied=True)
LAYER = {
    "input_layernorm.weight": (H,),
    "pre_mlp_layernorm.weight": (H,),
    "self_attention.linear_qkv.weight": (16, H),
    "self_attention.linear_proj.weight": (H, 8),
    "mlp.linear_fc1.weight": (2 * FF, H),
    "mlp.linear_fc2.weight": (H, FF),
}
HF_LAYER = {
    "input_layernorm.weight": (H,),
    "post_attention_layernorm.weight": (H,),
    "self_attn.q_proj.weight": (8, H),
    "self_attn.k_proj.weight": (4, H),
    "self_attn.v_proj.weight": (4, H),
    "self_attn.o_proj.weight": (H, 8),
    "mlp.gate_proj.weight": (FF, H),
    "mlp.up_proj.weight": (FF, H),
    "mlp.down_proj.weight": (H, FF),
}
ENDS = {
    "embedding.word_embeddings.weight": (VOCAB, H),
    "decoder.final_layernorm.weight": (H,),
    "output_layer.weight": (VOCAB, H),
}
HF_ENDS = {
    "model.embed_tokens.weight": (VOCAB, H),
    "model.norm.weight": (H,),
    "lm_head.weight": (VOCAB, H),
}
MOE_LAYER = {
    **{name: shape for name, shape in LAYER.items() if not name.startswith("mlp")},
    "self_attention.q_layernorm.weight": (2,),
    "self_attention.k_layernorm.weight": (2,),
    "mlp.router.weight": (4, H),
    **{f"mlp.experts.local_experts.{e}.linear_fc1.weight": (2 * FF, H) for e in range(2)},
    **{f"mlp.experts.local_experts.{e}.linear_fc2.weight": (H, FF) for e in range(2)},
}
HF_MOE_LAYER = {
    **{name: shape for name, shape in HF_LAYER.items() if not name.startswith("mlp")},
    "self_attn.q_norm.weight": (2,),
    "self_attn.k_norm.weight": (2,),
    "mlp.gate.weight": (4, H),
    **{f"mlp.experts.{e}.{x}_proj.weight": (FF, H) for e in range(4) for x in ("gate", "up")},
    **{f"mlp.experts.{e}.down_proj.weight": (H, FF) for e in range(4)},
}
STACKED = "Qwen3VLMoeForConditionalGeneration"
"""A family whose files stack the experts."""
HF_STACKED_LAYER = {
    **{name: shape for name, shape in HF_MOE_LAYER.items() if ".experts." not in name},
    "mlp.experts.gate_up_proj": (4, H, 2 * FF),
    "mlp.experts.down_proj": (4, FF, H),
}


class Chunk(nn.Module):
    """A model with these layers (numbered in the whole model), its parameters named as Megatron's."""

    def __init__(self, numbers: Sequence[int], layer: dict[str, Any] = LAYER, ends: dict[str, Any] = ENDS) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(nn.Module() for _ in numbers)
        for place, number in enumerate(numbers):
            self.decoder.layers[place].layer_number = number + 1  # Megatron counts from 1
            for name, shape in layer.items():
                self._put(self.decoder.layers[place], name, shape)
        for name, shape in ends.items():
            self._put(self, name, shape)
        experts = 4 if "mlp.router.weight" in layer else None
        self.config = SimpleNamespace(num_layers=LAYERS, num_moe_experts=experts, transformer_impl="local")

    def _put(self, module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
        *path, last = name.split(".")
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]
        module.register_parameter(last, nn.Parameter(torch.full(shape, -1.0)))


PAIR: Any = SimpleNamespace(size=lambda: 2)
"""A group of two ranks."""


def place(**changes: int) -> Parallel:
    alone: Any = SimpleNamespace(size=lambda: 1)
    numbers = {"rank": 0, **{f"{x}p": 1 for x in "tpcde"}, "etp": 1}
    ranks = dict.fromkeys(("tp_rank", "pp_rank", "cp_rank", "dp_rank", "etp_rank", "ep_rank", "edp_rank"), 0)
    values: Any = {**numbers, **ranks, **changes}
    return Parallel(**values, device=torch.device("cpu"), tp_group=alone, expert_group=alone)


def hf_shapes(layer: dict[str, Any] = HF_LAYER) -> dict[str, tuple[int, ...]]:
    layers = {f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}
    return {**HF_ENDS, **layers}


def write(folder: Path, shapes: dict[str, tuple[int, ...]], file: str = "model.safetensors") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / file)
    return tensors


def resharder(
    chunks: Sequence[Any], parallel: Parallel, dims: Dims = DIMS, family: str = "LlamaForCausalLM"
) -> Resharder:
    return Resharder(chunks, family, dims, parallel)


def whole(parallel: Parallel | None = None) -> Resharder:
    return resharder([Chunk(range(LAYERS))], parallel or place())


# --- there and back -----------------------------------------------------------------------------------------


def test_loaded_tensors_come_back_and_are_described_in_order(tmp_path: Path) -> None:
    given, weights = write(tmp_path, hf_shapes()), whole()
    load(weights, tmp_path)
    exported = list(weights.hf_tensors())
    assert {name: tensor.tolist() for name, tensor in exported} == {n: t.tolist() for n, t in given.items()}
    assert list(weights.described()) == [(name, tensor.dtype, tensor.shape) for name, tensor in exported]


def test_virtual_chunks_hold_their_numbered_layers(tmp_path: Path) -> None:
    given = write(tmp_path, hf_shapes())
    first_and_last = [Chunk([1], ends={}), Chunk([0], ends=ENDS)]
    weights = resharder(first_and_last, place())
    load(weights, tmp_path)
    norms = [chunk.decoder.layers[0].input_layernorm.weight for chunk in first_and_last]
    assert norms[0].equal(given["model.layers.1.input_layernorm.weight"])
    assert norms[1].equal(given["model.layers.0.input_layernorm.weight"])
    assert {name: t.tolist() for name, t in weights.hf_tensors()} == {n: t.tolist() for n, t in given.items()}


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_each_expert_parallel_rank_loads_its_own_experts(tmp_path: Path, ep_rank: int) -> None:
    given = write(tmp_path, hf_shapes(HF_MOE_LAYER))
    chunk = Chunk(range(LAYERS), MOE_LAYER)
    load(resharder([chunk], place(ep=2, ep_rank=ep_rank), family="Qwen3MoeForCausalLM"), tmp_path)
    for local in range(2):
        expert = chunk.decoder.layers[1].mlp.experts.local_experts._modules[str(local)]
        prefix = f"model.layers.1.mlp.experts.{2 * ep_rank + local}"
        assert expert.linear_fc2.weight.equal(given[f"{prefix}.down_proj.weight"])
        assert expert.linear_fc1.weight[FF:].equal(given[f"{prefix}.up_proj.weight"])


@pytest.mark.parametrize(
    ("family", "layer", "inside"),
    [
        ("Qwen3MoeForCausalLM", HF_MOE_LAYER, "model."),
        pytest.param(
            *(STACKED, HF_STACKED_LAYER, "model.language_model."),
            marks=pytest.mark.skipif(STACKED not in lookup.offered("families"), reason="no extension has this family"),
        ),
    ],
)
def test_experts_of_other_ranks_keep_their_numbers(
    family: str, layer: dict[str, Any], inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write(tmp_path, {name.replace("model.", inside): shape for name, shape in hf_shapes(layer).items()})
    sent: list[Tensor] = []

    def gather(shard: Tensor, parts: list[Tensor] | None, **_: Any) -> None:
        """The second rank has sent its shards before the first one gathers."""
        if parts is None:
            sent.append(shard)
        else:
            parts[0].copy_(shard)
            parts[1].copy_(sent.pop(0))

    monkeypatch.setattr(torch.distributed, "gather", gather)
    exported: dict[str, list[Any]] = {}
    for ep_rank in (1, 0):
        # with data parallelism, whose ranks hold the dense weights alike
        rank = dataclasses.replace(place(rank=ep_rank, dp=2, dp_rank=ep_rank, ep=2, ep_rank=ep_rank), expert_group=PAIR)
        weights = resharder([Chunk(range(LAYERS), MOE_LAYER)], rank, family=family)
        load(weights, tmp_path)
        exported = {name: tensor.tolist() for name, tensor in weights.hf_tensors()}
    assert exported == {name: tensor.tolist() for name, tensor in given.items()}
    assert sent == []


def test_described_tells_full_shapes_and_every_expert() -> None:
    dims = Dims(8, 4, 2, 9, tied=False)
    weights = resharder([Chunk([0], MOE_LAYER)], place(tp=2, ep=2, etp=2), dims, "Qwen3MoeForCausalLM")
    described = {name: tuple(shape) for name, _, shape in weights.described()}
    assert described["model.embed_tokens.weight"] == (9, H)  # two shards of 5 rows, one of them padding
    assert described["model.layers.0.self_attn.q_proj.weight"] == (16, H)
    assert described["model.layers.0.self_attn.o_proj.weight"] == (H, 16)
    assert described["model.layers.0.mlp.gate.weight"] == (4, H)
    assert [described[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"] for e in range(4)] == [(2 * FF, H)] * 4


@pytest.mark.parametrize("other", ["dp_rank", "cp_rank", "tp_rank"])
def test_ranks_that_do_not_export_yield_and_describe_nothing(other: str) -> None:
    layer = {name: shape for name, shape in LAYER.items() if "norm" in name}  # nothing that needs a gather
    weights = resharder([Chunk([0], layer, {})], place(**{other: 1, "edp_rank": 1}))
    assert list(weights.hf_tensors()) == []
    assert list(weights.described()) == []


def test_tied_copy_is_filled_and_not_exported_again(tmp_path: Path) -> None:
    given = write(tmp_path, hf_shapes())  # some tied checkpoints hold lm_head, too
    chunk = Chunk(range(LAYERS))
    weights = resharder([chunk], place(), TIED)
    load(weights, tmp_path)
    assert chunk.output_layer.weight.equal(given["model.embed_tokens.weight"])
    assert sorted(name for name, _ in weights.hf_tensors()) == sorted(given.keys() - {"lm_head.weight"})


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, {other: shape for other, shape in hf_shapes().items() if other != name})
    with pytest.raises(WeightsError, match=f"^{name} is missing in {tmp_path}"):
        load(whole(), tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",  # not in the family's table
        f"model.layers.{LAYERS}.input_layernorm.weight",  # a layer that config.json does not count
    ],
)
def test_left_over_tensor_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, {**hf_shapes(), name: (H,)})
    with pytest.raises(WeightsError, match=f"no place for: {name}$"):
        load(whole(), tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.gate_proj.weight", "model.layers.0.mlp.experts.4.up_proj.weight"])
def test_left_over_tensor_of_the_family_is_named(tmp_path: Path, name: str) -> None:
    """A dense MLP in a layer of experts; an expert that config.json does not count."""
    write(tmp_path, {**hf_shapes(HF_MOE_LAYER), name: (FF, H)})
    weights = resharder([Chunk(range(LAYERS), MOE_LAYER)], place(ep=2), family="Qwen3MoeForCausalLM")
    with pytest.raises(WeightsError, match=f"no place for: {name}$"):
        load(weights, tmp_path)


def test_many_left_over_tensors_are_counted(tmp_path: Path) -> None:
    write(tmp_path, {**hf_shapes(), **{f"extra.{number}": (1,) for number in range(7)}})
    with pytest.raises(WeightsError, match=r"extra\.0, .*, extra\.4 and 2 more$"):
        load(whole(), tmp_path)


@pytest.mark.parametrize(
    ("name", "shape", "right"),
    [
        ("model.layers.0.self_attn.k_proj.weight", (8, H), (4, H)),
        ("model.layers.1.mlp.down_proj.weight", (H, FF + 1), (H, FF)),
        ("model.norm.weight", (H, 1), (H,)),
        ("lm_head.weight", (VOCAB + 1, H), (VOCAB, H)),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_wrong_shape_is_named_with_the_right_one(
    tmp_path: Path, name: str, shape: tuple[int, ...], right: tuple[int, ...], tp: int
) -> None:
    """At tp=2, padding the vocabulary would hide an additional row."""
    write(tmp_path, {**hf_shapes(), name: shape})
    with pytest.raises(WeightsError, match=f"^{name} in .* is \\[") as caught:
        load(whole() if tp == 1 else shared_by_two(), tmp_path)
    assert str(list(shape)) in str(caught.value)
    assert str(list(right)) in str(caught.value)


def shared_by_two() -> Resharder:
    """Rank 0 of 2."""
    halves = {
        **{name: (shape[0] // 2, *shape[1:]) for name, shape in LAYER.items() if "qkv" in name or "fc1" in name},
        **{name: (shape[0], shape[1] // 2) for name, shape in LAYER.items() if "proj" in name or "fc2" in name},
    }
    ends = {name: ((VOCAB + 1) // 2, H) if len(shape) == 2 else shape for name, shape in ENDS.items()}
    return resharder([Chunk(range(LAYERS), {**LAYER, **halves}, ends)], place(tp=2))


def test_parameter_that_the_table_does_not_know_is_named(tmp_path: Path) -> None:
    write(tmp_path, hf_shapes())
    name = "mlp.linear_fc3.weight"
    weights = resharder([Chunk(range(LAYERS), {**LAYER, name: (H, H)})], place())
    for use in (lambda: load(weights, tmp_path), lambda: list(weights.hf_tensors()), lambda: list(weights.described())):
        with pytest.raises(WeightsError, match=f"^decoder.layers.0.{name}: LlamaForCausalLM's table has no rule"):
            use()


# --- folders ------------------------------------------------------------------------------------------------


def test_multi_token_layers_are_left_out_with_a_warning(tmp_path: Path) -> None:
    mtp = {f"model.layers.{LAYERS}.eh_proj.weight": (H, 2 * H), f"model.layers.{LAYERS}.input_layernorm.weight": (H,)}
    write(tmp_path, {**hf_shapes(), **mtp})
    with pytest.warns(UserWarning, match=f"left out 2 tensors of multi-token prediction.*layers.{LAYERS}.eh_proj"):
        load(whole(), tmp_path)
    with warnings.catch_warnings(action="error"):
        load(whole(place(rank=1, dp_rank=1)), tmp_path)


def test_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    """Some publishers' folders hold the same weights again in a file of their own."""
    given = write(tmp_path, hf_shapes(), "model-00001-of-00001.safetensors")
    write(tmp_path, {"layers.0.attention.wq.weight": (1,)}, "consolidated.safetensors")
    index = {"weight_map": dict.fromkeys(given, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    load(whole(), tmp_path)
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model-00002-of-00002.safetensors cannot be read"):
        load(whole(), tmp_path)


def test_folder_without_weights_and_broken_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no .safetensors file"):
        load(whole(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(WeightsError, match=r"model.safetensors cannot be read: .*Copy or convert it again"):
        load(whole(), tmp_path)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, {**hf_shapes(), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)})
    load(whole(), tmp_path)


def test_what_an_engine_fuses_comes_together() -> None:
    parts = [
        f"decoder.layers.0.self_attention.linear_{name}.weight" for name in ("q_down_proj", "q_up_proj", "kv_down_proj")
    ]
    mapping = Mapping("DeepseekV3ForCausalLM")
    resharder = object.__new__(Resharder)
    resharder.parallel, resharder.dims = place(), DIMS
    resharder.parameters = [(0, name, mapping.find(name)) for name in parts]
    order = [found.hf_names()[0].split(".")[-2] for _, _, found in resharder.exported]
    assert order == ["q_a_proj", "kv_a_proj_with_mqa", "q_b_proj"]
