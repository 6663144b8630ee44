"""Megatron shards join to the very HF tensors that they came from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.weights.names import FAMILIES, Dims, Mapping, Rule
from asyncrl.weights.reshard import dims_of

ARCHITECTURES = sorted(FAMILIES)
HIDDEN, LAYERS = 24, 2


@st.composite
def dims(draw: st.DrawFn, kv_heads: tuple[int, ...] = (4, 8)) -> Dims:
    """Any grouping of heads that 4 ranks can share, any vocabulary."""
    shared = draw(st.sampled_from(kv_heads))
    heads = shared * draw(st.sampled_from([1, 2, 3]))
    return Dims(heads, shared, draw(st.sampled_from([4, 6])), draw(st.integers(5, 40)), draw(st.booleans()))


def shapes(d: Dims) -> dict[str, tuple[int, ...]]:
    """HF's shapes, by the last words of their names."""
    queries, keys, inner = d.heads * d.head_dim, d.kv_heads * d.head_dim, 32
    return {
        "embed_tokens": (d.vocab, HIDDEN),
        "lm_head": (d.vocab, HIDDEN),
        "q_proj": (queries, HIDDEN),
        "k_proj": (keys, HIDDEN),
        "v_proj": (keys, HIDDEN),
        "o_proj": (HIDDEN, queries),
        "gate_proj": (inner, HIDDEN),
        "up_proj": (inner, HIDDEN),
        "down_proj": (HIDDEN, inner),
        "q_norm": (d.head_dim,),
        "k_norm": (d.head_dim,),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "norm": (HIDDEN,),
    }


def full_tensors(rule: Rule, d: Dims, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = shapes(d)
    return [torch.randn(sizes[name.split(".")[-2]], generator=generator).to(dtype) for name in rule.hf]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(dims(), st.sampled_from([1, 2, 4]), st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=60)
def test_join_of_all_shards_is_byte_equal_to_the_original(architecture, d, tp, seed, dtype) -> None:
    for rule in FAMILIES[architecture]:
        original = full_tensors(rule, d, seed, dtype)
        parts = [rule.layout.shard(original, tp, rank, d) for rank in range(tp)]
        assert len({part.shape for part in parts}) == 1  # a gather needs equal shapes
        joined = rule.layout.join(parts if rule.layout.split else parts[:1], d)
        assert len(joined) == len(original)
        for one, two in zip(original, joined, strict=True):
            assert one.shape == two.shape
            assert one.contiguous().view(torch.uint8).equal(two.contiguous().view(torch.uint8)), rule.megatron


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(dims(kv_heads=(1, 2, 4)), st.integers(0, 10**6))
@settings(max_examples=20)
def test_layouts_marked_whole_are_the_same_on_every_rank_and_the_others_hold_a_share(architecture, d, seed) -> None:
    for rule in FAMILIES[architecture]:
        original = full_tensors(rule, d, seed)
        degree = d.kv_heads
        parts = [rule.layout.shard(original, degree, rank, d) for rank in range(degree)]
        if rule.layout.split:
            rows = "embed_tokens" in rule.hf[0] or "lm_head" in rule.hf[0]
            padding = -d.vocab % degree * HIDDEN if rows else 0
            assert sum(part.numel() for part in parts) == sum(tensor.numel() for tensor in original) + padding
        else:
            assert all(part.equal(original[0]) for part in parts)


def test_queries_keys_and_values_interleave_by_key_value_head() -> None:
    d = Dims(heads=4, kv_heads=2, head_dim=1, vocab=5, tied=False)
    q, k, v = (torch.arange(n)[:, None] + base for n, base in ((4, 0), (2, 10), (2, 20)))
    names, layout = Mapping("LlamaForCausalLM").find("decoder.layers.0.self_attention.linear_qkv.weight")
    assert [name.split(".")[-2] for name in names] == ["q_proj", "k_proj", "v_proj"]
    assert layout.shard([q, k, v], 1, 0, d).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert layout.shard([q, k, v], 2, 1, d).flatten().tolist() == [2, 3, 11, 21]


def test_each_rank_holds_its_own_gate_above_its_own_up() -> None:
    names, layout = Mapping("LlamaForCausalLM").find("decoder.layers.3.mlp.linear_fc1.weight")
    assert [name.split(".")[-2] for name in names] == ["gate_proj", "up_proj"]
    d = Dims(1, 1, 1, 1, tied=False)
    gate, up = torch.arange(4)[:, None], torch.arange(10, 14)[:, None]
    assert layout.shard([gate, up], 2, 1, d).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zeros_at_its_end() -> None:
    _, layout = Mapping("LlamaForCausalLM").find("embedding.word_embeddings.weight")
    d = Dims(1, 1, 1, 5, tied=False)
    table = torch.arange(1, 6)[:, None]
    assert [layout.shard([table], 4, rank, d).flatten().tolist() for rank in range(4)] == [
        [1, 2],
        [3, 4],
        [5, 0],
        [0, 0],
    ]


def test_find_puts_the_layer_into_every_hf_name() -> None:
    names, _ = Mapping("Qwen3ForCausalLM").find("decoder.layers.17.self_attention.linear_qkv.weight")
    assert names == tuple(f"model.layers.17.self_attn.{x}_proj.weight" for x in "qkv")
    assert Mapping("Qwen3ForCausalLM").find("decoder.layers.0.self_attention.k_layernorm.weight")[0] == (
        "model.layers.0.self_attn.k_norm.weight",
    )
    assert Mapping("LlamaForCausalLM").find("decoder.final_layernorm.weight")[0] == ("model.norm.weight",)


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
    with pytest.raises(KeyError, match=name.replace(".", r"\.")):
        Mapping("LlamaForCausalLM").find(name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_hf_tensor_is_named_twice_and_all_of_the_hf_model_are_named(architecture: str) -> None:
    named = [name.format(layer) for rule in FAMILIES[architecture] for layer in range(LAYERS) for name in rule.hf]
    named = sorted(set(named))
    assert len({name for rule in FAMILIES[architecture] for name in rule.hf}) == sum(
        len(rule.hf) for rule in FAMILIES[architecture]
    )
    assert named == sorted(_hf_names(architecture))


def _hf_names(architecture: str) -> list[str]:
    import transformers

    config_class = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    config = config_class(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=LAYERS,
        vocab_size=8,
        head_dim=4,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        return [name for name, _ in getattr(transformers, architecture)(config).named_parameters()]


def test_dims_come_from_the_hf_config_with_its_defaults() -> None:
    assert dims_of({"num_attention_heads": 4, "hidden_size": 32, "vocab_size": 7}) == Dims(4, 4, 8, 7, tied=False)
    hf = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "head_dim": 16,
        "vocab_size": 7,
        "tie_word_embeddings": True,
    }
    assert dims_of(hf) == Dims(4, 2, 16, 7, tied=True)
