"""Megatron shards join to the very HF tensors that they came from, and every HF tensor of a family has its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from asyncrl.errors import WeightsError
from asyncrl.models import families, parts
from asyncrl.models.tiny import write_random_model
from asyncrl.weights import layouts
from asyncrl.weights.bucket import unit_of
from asyncrl.weights.layouts import (
    COLUMN,
    FUSED_GATE_UP,
    FUSED_QKV,
    GATE_UP,
    INTERLEAVED,
    INTERLEAVED_GATE_UP,
    QKV,
    ROW,
    STACKED_DOWN,
    STACKED_GATE_UP,
    VOCAB,
    WHOLE,
    Dims,
    TensorLayout,
    dims_of,
)
from asyncrl.weights.mapping import Mapping, local_name, table, tables

HIDDEN = 8
ONE = Dims(heads=1, kv_heads=1, head_dim=1, vocab=5, tied=False)

# --- layouts ------------------------------------------------------------------------------------------------


@st.composite
def dims(draw: st.DrawFn) -> Dims:
    """Any grouping of heads that 4 ranks can share, also with fewer key-value heads than ranks, any vocabulary."""
    shared = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(4, shared) * draw(st.sampled_from([1, 2, 3]))
    return Dims(
        heads,
        shared,
        draw(st.sampled_from([2, 4] if shared < 4 else [2, 3])),
        draw(st.integers(5, 40)),
        draw(st.booleans()),
    )


def shapes(layout: TensorLayout, d: Dims) -> list[tuple[int, ...]]:
    """HF's shapes of what one parameter holds."""
    keys = (d.kv_heads * d.head_dim, HIDDEN)
    found: dict[TensorLayout, list[tuple[int, ...]]] = {
        WHOLE: [(HIDDEN,)],
        COLUMN: [(12, HIDDEN)],
        ROW: [(HIDDEN, 12)],
        VOCAB: [(d.vocab, HIDDEN)],
        QKV: [(d.heads * d.head_dim, HIDDEN), keys, keys],
        GATE_UP: [(12, HIDDEN), (12, HIDDEN)],
        FUSED_GATE_UP: [(24, HIDDEN)],
        INTERLEAVED: [(24, HIDDEN)],
        STACKED_GATE_UP: [(HIDDEN, 24)],
        INTERLEAVED_GATE_UP: [(HIDDEN, 24)],
        STACKED_DOWN: [(12, HIDDEN)],
        FUSED_QKV: [((d.heads + 2 * d.kv_heads) * d.head_dim, HIDDEN)],
    }
    return found[layout]


def test_what_an_engine_fuses_from_one_call_is_one_unit() -> None:
    a, b = (f"model.layers.3.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa"))
    assert unit_of(a) == unit_of(b) != unit_of(a.replace("3", "4"))
    assert unit_of("model.layers.3.self_attn.q_proj.weight") == "model.layers.3.self_attn.q_proj.weight"


def test_every_layout_is_tested_here() -> None:
    assert {value for value in vars(layouts).values() if isinstance(value, TensorLayout)} == {
        WHOLE, COLUMN, ROW, VOCAB, QKV, GATE_UP, FUSED_GATE_UP, FUSED_QKV, STACKED_GATE_UP, INTERLEAVED_GATE_UP,
        INTERLEAVED, STACKED_DOWN,
    }  # fmt: skip


STACKED = [STACKED_GATE_UP, INTERLEAVED, INTERLEAVED_GATE_UP, STACKED_DOWN]


@pytest.mark.parametrize("layout", [WHOLE, COLUMN, ROW, VOCAB, QKV, GATE_UP, FUSED_GATE_UP, FUSED_QKV, *STACKED])
@given(dims(), st.sampled_from([1, 2, 4]), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60)
def test_joined_shards_are_byte_equal_and_no_rank_has_more(layout, d, tp, seed, dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    original = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes(layout, d)]
    parts = [layout.shard(original, tp, rank, d) for rank in range(tp)]
    assert len({part.shape for part in parts}) == 1  # a gather needs equal shapes
    for one, pieces in zip(original, layout.join(parts if layout.split else parts[:1], d), strict=True):
        two = torch.full_like(one, -1)
        pieces.copy_to(two)
        assert two.equal(pieces.tensor())
        two = pieces.tensor()
        assert one.shape == two.shape
        assert one.contiguous().view(torch.uint8).equal(two.contiguous().view(torch.uint8))
    if layout.split:
        padding = -d.vocab % tp * HIDDEN if layout is VOCAB else 0
        assert sum(part.numel() for part in parts) == sum(tensor.numel() for tensor in original) + padding
    else:
        assert all(part.equal(original[0]) for part in parts)


@given(dims(), st.sampled_from([1, 2, 4]))
@settings(max_examples=20)
def test_qkv_biases_are_laid_out_as_their_matrices(d, tp) -> None:
    whole = [torch.arange(shape[0]) + 100 * i for i, shape in enumerate(shapes(QKV, d))]
    for rank in range(tp):
        as_matrix = QKV.shard([bias[:, None] for bias in whole], tp, rank, d)
        assert QKV.shard(whole, tp, rank, d).equal(as_matrix[:, 0])
    joined = QKV.join([QKV.shard(whole, tp, rank, d) for rank in range(tp)], d)
    assert all(one.equal(two.tensor()) for one, two in zip(whole, joined, strict=True))


def column(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None]


def test_queries_keys_and_values_interleave_by_key_value_head() -> None:
    d = Dims(heads=4, kv_heads=2, head_dim=1, vocab=5, tied=False)
    qkv = [column(0, 1, 2, 3), column(10, 11), column(20, 21)]
    assert QKV.shard(qkv, 1, 0, d).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert QKV.shard(qkv, 2, 1, d).flatten().tolist() == [2, 3, 11, 21]


def test_each_rank_holds_its_own_gate_above_its_own_up() -> None:
    assert GATE_UP.shard([column(0, 1, 2, 3), column(10, 11, 12, 13)], 2, 1, ONE).flatten().tolist() == [2, 3, 12, 13]


def test_experts_of_a_stack_have_every_second_column_for_gate() -> None:
    """And every rank its own part of gate and of up, of the matrix and of the bias."""
    columns = torch.tensor([[0, 10, 1, 11, 2, 12, 3, 13]])
    assert INTERLEAVED_GATE_UP.shard([columns], 2, 1, ONE).flatten().tolist() == [2, 3, 12, 13]
    assert INTERLEAVED_GATE_UP.shard([columns[0]], 2, 1, ONE).tolist() == [2, 3, 12, 13]
    assert INTERLEAVED_GATE_UP.join([torch.tensor([0, 10]), torch.tensor([1, 11])], ONE)[0].tensor().tolist() == [
        0,
        10,
        1,
        11,
    ]


def test_vocabulary_is_padded_with_zeros_at_its_end() -> None:
    shards = [VOCAB.shard([column(1, 2, 3, 4, 5)], 4, rank, ONE).flatten().tolist() for rank in range(4)]
    assert shards == [[1, 2], [3, 4], [5, 0], [0, 0]]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("layout", [WHOLE, COLUMN, ROW, VOCAB, QKV, GATE_UP, FUSED_GATE_UP, FUSED_QKV])
def test_pieces_are_views_of_the_shards(layout, degree) -> None:
    d = Dims(heads=4, kv_heads=2, head_dim=1, vocab=15, tied=False)
    shards = [torch.zeros(8, 8) for _ in range(degree)]
    memory = {shard.untyped_storage().data_ptr() for shard in shards}
    joined = layout.join(shards, d)
    assert {part.untyped_storage().data_ptr() for pieces in joined for part in pieces.parts} <= memory


def test_dims_come_from_the_hf_config_with_its_defaults() -> None:
    hf = {"num_attention_heads": 4, "hidden_size": 32, "vocab_size": 7}
    assert dims_of(hf) == Dims(4, 4, 8, 7, tied=False)
    given_ = {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    assert dims_of({**hf, **given_}) == Dims(4, 2, 16, 7, tied=True)


# --- names --------------------------------------------------------------------------------------------------


def test_numbers_of_layer_and_expert_stand_in_every_hf_name() -> None:
    attention = Mapping("Qwen3MoeForCausalLM").find("decoder.layers.17.self_attention.linear_qkv.weight")
    assert attention.hf_names() == tuple(f"model.layers.17.self_attn.{x}_proj.weight" for x in "qkv")
    assert not attention.routed
    expert = Mapping("Qwen3MoeForCausalLM").find("decoder.layers.3.mlp.experts.local_experts.12.linear_fc1.weight")
    assert expert.hf_names(expert_offset=4) == tuple(
        f"model.layers.3.mlp.experts.16.{x}_proj.weight" for x in ("gate", "up")
    )
    assert expert.routed
    assert Mapping("LlamaForCausalLM").find("decoder.final_layernorm.weight").hf_names() == ("model.norm.weight",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
        ("self_attention.q_layernorm.weight", "self_attention.q_layernorm.weight"),
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.shared_experts.linear_fc1.weight", "mlp.shared_experts.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight12", "mlp.experts.local_experts.12.linear_fc2.weight"),
    ],
)
def test_te_names_become_those_of_local_layers(name: str, expected: str) -> None:
    assert local_name(f"decoder.layers.3.{name}") == f"decoder.layers.3.{expected}"


def test_transformer_engine_holds_latent_down_projections_whole() -> None:
    name = "decoder.layers.0.self_attention.linear_kv_down_proj.weight"
    assert Mapping("DeepseekV3ForCausalLM").find(name).layout is COLUMN
    assert Mapping("DeepseekV3ForCausalLM", transformer_engine=True).find(name).layout is WHOLE


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.3.mlp.router.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.q_layernorm.weight",  # Llama has none
        "word_embeddings.weight",
    ],
)
def test_unknown_parameter_is_named(name: str) -> None:
    with pytest.raises(WeightsError, match=rf"{name}.*LlamaForCausalLM".replace(".weight", r"\.weight")):
        Mapping("LlamaForCausalLM").find(name)


def test_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(WeightsError, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
        Mapping("GPT2LMHeadModel")


@pytest.mark.parametrize("architecture", tables())
def test_tables_name_each_tensor_of_transformers_once(architecture: str, tmp_path: Path) -> None:
    family = families.known_families()[architecture]
    kind, written = family.model_type, set[str]()
    for number, fields in enumerate(({}, *family.variants)):
        sizes = {"vocab": 9, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 8}
        folder = tmp_path / str(number)
        if family.tower:
            tiny_vision = pytest.importorskip("asyncrl.extensions.vision.tiny")
            tiny_vision.write(folder, kind, **fields)
        else:
            write_random_model(folder, kind, **sizes, tied=False, seed=0, dtype="float32", fields=dict(fields))
        with safe_open(folder / "model.safetensors", "pt") as file:
            written |= set(file.keys())
    if family.defaults.get("tie_word_embeddings"):  # Megatron's last stage has the embedding under the other name
        written.add("lm_head.weight")
    generic = {
        re.sub(r"experts\.\d+", "experts.{expert}", re.sub(r"layers\.\d+", "layers.{layer}", n)) for n in written
    }
    named = [name for rule in tables()[architecture] if rule not in table(parts.MTP) for name in rule.hf]
    prefix = family.tower.prefix if family.tower else "no tower"
    assert sorted(named) == sorted(name for name in generic if not name.startswith(prefix))
    mapping = Mapping(architecture)
    assert all(mapping.knows(name) for name in written)
    assert mapping.knows("model.layers.1.enorm.weight") == (table(parts.MTP)[0] in tables()[architecture])
    assert mapping.knows("visual.patch_embed.proj.weight") == (prefix == "visual.")
