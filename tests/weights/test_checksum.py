"""The hashes that an SGLang engine must answer with, from hand-made tensors cut by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from asyncrl.errors import ConfigError, WeightsError
from asyncrl.models.families import known_families
from asyncrl.parallel import EngineParallel
from asyncrl.weights.checksum import ExpectedChecksums
from asyncrl.weights.engine_layout import table
from tests.weights.models import EXPERTS, HEAD_DIM, HEADS, HIDDEN, VOCAB, config, digest, model, shape

ARCHITECTURES = sorted(known_families())


def results(tensors: dict[str, Tensor], hf: dict[str, Any], tp: int, device: Any = "cpu") -> list[dict[str, str]]:
    expected = ExpectedChecksums(hf, EngineParallel(tp), dtype=torch.bfloat16, device=device)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    return expected.result()


def distinct(*size: int) -> Tensor:
    """All elements differ."""
    return torch.arange(1, 1 + torch.Size(size).numel(), dtype=torch.float32).view(size) / 64


# --- cuts, written out --------------------------------------------------------------------------------------

HEADS_OF_RANKS = {  # device, tp, kv heads -> for each rank: its query heads, its key-value heads; "." is padding
    ("cuda", 1, 1): ["0123 0"],
    ("cuda", 1, 2): ["0123 01"],
    ("cuda", 2, 1): ["01 0", "23 0"],
    ("cuda", 2, 2): ["01 0", "23 1"],
    ("cuda", 4, 1): ["0 0", "1 0", "2 0", "3 0"],
    ("cuda", 4, 2): ["0 0", "1 0", "2 1", "3 1"],
    ("cpu", 1, 1): ["0123 0"],
    ("cpu", 1, 2): ["0123 01"],
    ("cpu", 2, 1): ["0123 0", ".... ."],
    ("cpu", 2, 2): ["01 0", "23 1"],
    ("cpu", 4, 1): ["0123 0", ".... .", ".... .", ".... ."],
    ("cpu", 4, 2): ["01 0", "23 1", ".. .", ".. ."],
}


def chosen(tensor: Tensor, heads: str, total: int, dim: int = 0) -> Tensor:
    blocks = tensor.chunk(total, dim)
    return torch.cat([torch.zeros_like(blocks[0]) if head == "." else blocks[int(head)] for head in heads], dim)


@pytest.mark.parametrize(("device", "tp", "kv_heads"), HEADS_OF_RANKS)
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_rank_holds_its_queries_above_its_keys_and_values(device: Any, tp: int, kv_heads: int, kind: str) -> None:
    width = (HIDDEN,) if kind == "weight" else ()
    q, k, v = (distinct(heads * HEAD_DIM, *width) * sign for heads, sign in ((HEADS, 1), (kv_heads, -1), (kv_heads, 3)))
    hf = config("Qwen2ForCausalLM", num_key_value_heads=kv_heads)
    expected = ExpectedChecksums(hf, EngineParallel(tp), dtype=torch.float32, device=device)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expected.add(f"model.layers.5.self_attn.{name}_proj.{kind}", tensor)
    cut = []
    for heads in HEADS_OF_RANKS[device, tp, kv_heads]:
        queries, keys = heads.split()
        parts = [chosen(q, queries, HEADS), chosen(k, keys, kv_heads), chosen(v, keys, kv_heads)]
        cut.append({f"model.layers.5.self_attn.qkv_proj.{kind}": digest(torch.cat(parts), device)})
    assert expected.result() == cut


@pytest.mark.parametrize(("device", "tp", "kv_heads"), HEADS_OF_RANKS)
def test_rank_holds_its_queries_columns_of_the_output(device: Any, tp: int, kv_heads: int) -> None:
    full, name = distinct(HIDDEN, HEADS * HEAD_DIM), "model.layers.0.self_attn.o_proj.weight"
    expected = ExpectedChecksums(
        config(num_key_value_heads=kv_heads), EngineParallel(tp), dtype=torch.float32, device=device
    )
    expected.add(name, full)
    ranks = HEADS_OF_RANKS[device, tp, kv_heads]
    assert expected.result() == [{name: digest(chosen(full, heads.split()[0], HEADS, 1), device)} for heads in ranks]


@pytest.mark.parametrize(
    ("inner", "tp", "padded"), [(128, 1, 128), (128, 2, 128), (128, 4, 128), (40, 1, 64), (72, 2, 128)]
)
def test_gated_mlps_and_experts_are_cut_and_stacked(inner: int, tp: int, padded: int) -> None:
    def random_experts(*size: int) -> Tensor:
        return distinct(EXPERTS, *size)

    gate, up, down = random_experts(inner, HIDDEN), -random_experts(inner, HIDDEN), random_experts(HIDDEN, inner) / 7
    prefix = "model.layers.1.mlp"
    tensors = {
        f"{prefix}.{place}{name}_proj.weight": full[expert]
        for expert in range(EXPERTS)
        for place in [f"experts.{expert}.", *["shared_experts."] * (expert == 0)]
        for name, full in (("gate", gate), ("up", up), ("down", down))
    }
    expected = ExpectedChecksums(config("Glm4MoeForCausalLM"), EngineParallel(tp), dtype=torch.float32)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    gate, up = (pad(tensor, (0, 0, 0, padded - inner)) for tensor in (gate, up))
    down = pad(down, (0, padded - inner))
    for rank, found in enumerate(expected.result()):
        mine = slice(rank * padded // tp, (rank + 1) * padded // tp)
        w13 = torch.stack([torch.cat([gate[expert, mine], up[expert, mine]]) for expert in range(EXPERTS)])
        w2 = torch.stack([down[expert][:, mine] for expert in range(EXPERTS)])
        assert found == {
            f"{prefix}.experts.w13_weight": digest(w13),
            f"{prefix}.experts.w2_weight": digest(w2),
            f"{prefix}.shared_experts.gate_up_proj.weight": digest(w13[0]),
            f"{prefix}.shared_experts.down_proj.weight": digest(w2[0]),
        }


@pytest.mark.parametrize(("vocab", "tp", "rows"), [(64, 1, 64), (70, 1, 128), (70, 2, 64), (50, 4, 16), (50, 3, 64)])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_the_vocabulary_is_padded_with_zeros_to_a_multiple_of_64(vocab: int, tp: int, rows: int, name: str) -> None:
    full = distinct(vocab, HIDDEN)
    expected = ExpectedChecksums(config(), EngineParallel(tp), dtype=torch.float32)
    expected.add(name, full)
    padded = pad(full, (0, 0, 0, rows * tp - vocab))
    assert expected.result() == [{name: digest(padded[rank * rows : (rank + 1) * rows])} for rank in range(tp)]


def held(shape: EngineParallel, tensors: dict[str, Tensor], hf: dict[str, Any], device: Any = "cuda") -> list[dict]:
    expected = ExpectedChecksums(hf, shape, dtype=torch.float32, device=device)
    for name, tensor in tensors.items():
        expected.add(name, tensor)
    return expected.result()


@pytest.mark.parametrize("reverse", [False, True])
def test_group_of_ranks_divides_its_own_experts(reverse: bool) -> None:
    gate, up = distinct(4, 8, HIDDEN), -distinct(4, 8, HIDDEN)
    prefix = "model.layers.0.mlp.experts"
    tensors = {
        f"{prefix}.{expert}.{name}_proj.weight": full[expert]
        for expert in range(4)
        for name, full in (("gate", gate), ("up", up))
    }
    if reverse:
        tensors = dict(reversed(tensors.items()))
    hf = config("Qwen3MoeForCausalLM", n_routed_experts=4)
    for rank, found in enumerate(held(EngineParallel(tp=4, ep=2), tensors, hf)):
        experts, rows = slice(rank // 2 * 2, rank // 2 * 2 + 2), slice(rank % 2 * 4, rank % 2 * 4 + 4)
        both = torch.cat([gate[experts, rows], up[experts, rows]], 1)
        assert found == {f"{prefix}.w13_weight": digest(both, "cuda")}


def test_shared_expert_is_apart_from_divided_ones() -> None:
    name = "model.layers.0.mlp.shared_experts.down_proj.weight"
    full = distinct(HIDDEN, 8)
    found = held(EngineParallel(tp=2, ep=2), {name: full}, config("Glm4MoeForCausalLM", n_shared_experts=1))
    assert found == [{name: digest(full[:, :4], "cuda")}, {name: digest(full[:, 4:], "cuda")}]


def test_attention_replicas_share_heads_and_divide_mlps() -> None:
    attention, mlp = "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"
    tensors = {
        attention: distinct(HIDDEN, HEADS * HEAD_DIM),
        mlp: distinct(HIDDEN, 8),
        "model.embed_tokens.weight": distinct(256, HIDDEN),
        "lm_head.weight": -distinct(256, HIDDEN),
    }
    for rank, found in enumerate(held(EngineParallel(tp=4, dp=2), tensors, config("Qwen3ForCausalLM"))):
        assert found == {
            attention: digest(tensors[attention].chunk(2, 1)[rank % 2], "cuda"),
            mlp: digest(tensors[mlp].chunk(4, 1)[rank], "cuda"),
            "model.embed_tokens.weight": digest(tensors["model.embed_tokens.weight"].chunk(2)[rank % 2], "cuda"),
            "lm_head.weight": digest(tensors["lm_head.weight"].chunk(4)[rank], "cuda"),
        }


@pytest.mark.parametrize(
    ("architecture", "tied", "heads"),
    [
        ("Qwen3ForCausalLM", False, {1: "head"}),
        ("Qwen3ForCausalLM", True, {1: "embed"}),
        ("Qwen3MoeForCausalLM", False, {0: "head", 1: "head"}),
    ],
)
def test_stage_has_its_layers_and_the_last_the_head(architecture: str, tied: bool, heads: dict[int, str]) -> None:
    embed, head, norm = distinct(64, HIDDEN), -distinct(64, HIDDEN), distinct(HIDDEN)
    layers = {f"model.layers.{number}.input_layernorm.weight": norm + number for number in range(3)}
    tensors = {**layers, "model.embed_tokens.weight": embed, "model.norm.weight": norm / 2, "lm_head.weight": head}
    hf = config(architecture, num_hidden_layers=3, tie_word_embeddings=tied)
    stages = held(EngineParallel(tp=2, pp=2), tensors, hf, "cpu")
    for rank, found in enumerate(stages):
        stage, half = rank // 2, {"embed": embed.chunk(2)[rank % 2], "head": head.chunk(2)[rank % 2]}
        here = list(layers)[: stage + 1] if stage == 0 else list(layers)[1:]
        assert found == {
            **{name: digest(layers[name]) for name in here},
            **({"model.embed_tokens.weight": digest(half["embed"])} if stage == 0 else {}),
            **({"model.norm.weight": digest(norm / 2)} if stage == 1 else {}),
            **({"lm_head.weight": digest(half[heads[stage]])} if stage in heads else {}),
        }


def test_latent_attention_is_cut_by_heads_alone() -> None:
    tensors, hf = model("DeepseekV3ForCausalLM"), config("DeepseekV3ForCausalLM", num_key_value_heads=HEADS)
    attention = "model.layers.0.self_attn"
    for rank, found in enumerate(results(tensors, hf, 2)):
        down = [tensors[f"{attention}.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        assert found[f"{attention}.fused_qkv_a_proj_with_mqa.weight"] == digest(torch.cat(down))
        for name in ("q_b_proj", "kv_b_proj"):
            assert found[f"{attention}.{name}.weight"] == digest(tensors[f"{attention}.{name}.weight"].chunk(2)[rank])


def test_latent_attention_without_query_rank_keeps_two() -> None:
    hf = config("DeepseekV3ForCausalLM", num_key_value_heads=HEADS, q_lora_rank=None)
    tensors = {f"model.layers.0.self_attn.{name}.weight": distinct(8, 8) for name in ("q_proj", "kv_a_proj_with_mqa")}
    assert [found.keys() for found in results(tensors, hf, 1)] == [tensors.keys()]


def test_engine_keeps_router_precision_and_converts_the_rest() -> None:
    gate, bias, norm = (
        f"model.layers.0.{name}"
        for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "input_layernorm.weight")
    )
    sent = {name: distinct(*shape(name)) / 3 for name in (gate, bias, norm)}
    for architecture, router in (("Glm4MoeForCausalLM", torch.float32), ("DeepseekV3ForCausalLM", torch.bfloat16)):
        (found,) = results(sent, config(architecture), 1)
        assert found == {
            gate: digest(sent[gate].to(router)),
            bias: digest(sent[bias]),
            norm: digest(sent[norm].bfloat16()),
        }


@pytest.mark.parametrize(("architecture", "experts"), [("Glm4MoeForCausalLM", EXPERTS), ("DeepseekV3ForCausalLM", 256)])
def test_single_shared_expert_is_the_last_routed_on_gpus(architecture: str, experts: int) -> None:
    hf = config(architecture, n_shared_experts=1, n_routed_experts=experts)
    inner = "model.layers.0.mlp"
    routed = [distinct(HIDDEN, 4) + expert for expert in range(experts + 1)]
    tensors = {f"{inner}.experts.{expert}.down_proj.weight": routed[expert] for expert in range(experts)}
    tensors[f"{inner}.shared_experts.down_proj.weight"] = routed[-1]
    whole = torch.stack(routed).bfloat16()
    assert results(tensors, hf, 1, "cuda") == [{f"{inner}.experts.w2_weight": digest(whole, "cuda")}]
    assert f"{inner}.shared_experts.down_proj.weight" in results(tensors, hf, 1, "cpu")[0]


def test_stacked_experts_are_transposed_and_divided() -> None:
    """gpt-oss's, as SGLang's loader cuts them. Its biases are held in float32; the second counts on an expert's first
    rank alone."""
    experts, hf = "model.layers.0.mlp.experts", config("GptOssForCausalLM", n_routed_experts=None, num_local_experts=4)
    draw = torch.Generator().manual_seed(0)
    shapes = {"gate_up_proj": (4, 8, 256), "gate_up_proj_bias": (4, 256), "down_proj": (4, 128, 8)}
    stacks = {name: torch.randn(size, generator=draw).bfloat16() for name, size in shapes.items()}
    bias = stacks["down_proj_bias"] = torch.randn(4, 8, generator=draw).bfloat16()
    found = results({f"{experts}.{name}": stack for name, stack in stacks.items()}, hf, 2)
    for rank, last in enumerate((bias, torch.zeros_like(bias))):
        rows, columns = slice(128 * rank, 128 * rank + 128), slice(64 * rank, 64 * rank + 64)
        assert found[rank] == {
            f"{experts}.w13_weight": digest(stacks["gate_up_proj"].transpose(1, 2)[:, rows].contiguous()),
            f"{experts}.w13_weight_bias": digest(stacks["gate_up_proj_bias"][:, rows].float().contiguous()),
            f"{experts}.w2_weight": digest(stacks["down_proj"].transpose(1, 2)[:, :, columns].contiguous()),
            f"{experts}.w2_weight_bias": digest(last.float()),
        }


# --- whole models -------------------------------------------------------------------------------------------

FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
}
EXPERT = {"gate_proj": "w13", "up_proj": "w13", "down_proj": "w2", "w1": "w13", "w3": "w13", "w2": "w2"}
STACKS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
STACKS |= {f"{name}_bias": f"{parameter}_bias" for name, parameter in STACKS.items()}
EVERYWHERE = ("norm.", "gate.", "router.", "q_a_proj.", "kv_a_proj_with_mqa.", "o_proj.bias", "expert_bias")
"""Parts of the names of what all ranks hold."""
ON_THE_FIRST_RANK = ("experts.down_proj_bias",)


def engine_name(name: str, architecture: str) -> str:
    if not known_families()[architecture].serving.fuses:
        return name
    words = name.replace("model.language_model.", "model.").replace(".router.gate.", ".gate.").split(".")
    if words[-2] == "experts":
        return ".".join([*words[:-1], STACKS[words[-1]]])
    if words[-1] == "sinks":
        return name
    if "experts" in words:
        return ".".join([*words[: words.index("experts") + 1], f"{EXPERT[words[-2]]}_weight"])
    return ".".join([*words[:-2], FUSED.get(words[-2], words[-2]), words[-1]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("device", "kv_heads"), [("cpu", 2), ("cuda", 1)])
def test_flipped_bit_shows_in_its_parameter_and_ranks(architecture: str, device: Any, kv_heads: int) -> None:
    hf, tensors = config(architecture, num_key_value_heads=kv_heads), model(architecture, kv_heads=kv_heads)
    before = results(tensors, hf, 2, device)
    assert {name for found in before for name in found} == {engine_name(name, architecture) for name in tensors}
    for number, (name, tensor) in enumerate(tensors.items()):
        parameter = engine_name(name, architecture)
        beside = {other: one for other, one in tensors.items() if engine_name(other, architecture) == parameter}
        if number % 16 == 0:  # all others as well, which must not change
            beside = tensors
        for element, rank in ((0, 0), (-1, 1)):  # the first lies on rank 0, the last on rank 1
            flipped = tensor.clone()
            flipped.view(torch.int16).view(-1)[element] ^= 1
            after = results({**beside, name: flipped}, hf, 2, device)
            changed = {(r, key) for r in (0, 1) for key in after[r] if before[r][key] != after[r][key]}
            keys = ("k_proj", "v_proj", "qkv_proj") if element else ("k_proj", "v_proj")  # the last of all are values
            shared_key = kv_heads == 1 and name.split(".")[-2] in keys
            whole = EVERYWHERE + (("embed_tokens.",) if architecture == "Gemma3ForCausalLM" else ())
            everywhere = shared_key or any(word in name for word in whole)
            ranks = (0, 1) if everywhere else (0,) if name.endswith(ON_THE_FIRST_RANK) else (rank,)
            assert changed == {(r, parameter) for r in ranks}, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_order_of_tensors_does_not_matter(architecture: str) -> None:
    hf, tensors = config(architecture), model(architecture)
    expected = results(tensors, hf, 2)
    for seed in range(3):
        shuffled = list(tensors.items())
        random.Random(seed).shuffle(shuffled)
        assert results(dict(shuffled), hf, 2) == expected


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_sent_tensor_has_a_place_and_every_rule_is_used(architecture: str) -> None:
    sent, rules = model(architecture), table(known_families()[architecture], config(architecture))
    # as transformers names them, of a tower of one block
    tower = [name for rule in rules for name, _ in rule.parts if name.startswith("visual.")]
    sent |= {name.format(block=0): torch.ones(1) for name in tower}
    found = set(results(sent, config(architecture), 1)[0])
    latent = "kv_lora_rank" in known_families()[architecture].tiny  # its queries may come through a low rank, or not
    unsent = {"model.layers.0.self_attn.q_proj.weight"} if latent else set()
    assert {rule.engine.format(layer=0, block=0) for rule in rules} - found == unsent


def held_bytes(expected: ExpectedChecksums) -> int:
    """Return the bytes of the tensors that are kept because they arrived early."""
    return sum(part.nbytes for parameter in expected._open.values() for _, part in parameter.early.values())


def test_only_early_tensors_are_held() -> None:
    hf, attention = config(), "model.layers.0.self_attn"
    q, k, v = (distinct(heads * HEAD_DIM, HIDDEN).bfloat16() for heads in (HEADS, 2, 2))
    expected = ExpectedChecksums(hf, EngineParallel(), dtype=torch.bfloat16)
    held = []
    value = v.clone()
    for name, tensor in (("v", value), ("q", q), ("k", k)):
        expected.add(f"{attention}.{name}_proj.weight", tensor)
        held.append(held_bytes(expected))
        value.zero_()
    assert held == [v.nbytes, v.nbytes, 0]
    assert expected.result() == [{f"{attention}.qkv_proj.weight": digest(torch.cat([q, k, v]))}]


def test_in_the_trainers_order_nothing_is_held() -> None:
    expected = ExpectedChecksums(config("Qwen3MoeForCausalLM"), EngineParallel(2), dtype=torch.bfloat16)
    tensors = model("Qwen3MoeForCausalLM")
    ordered = sorted(tensors, key=lambda name: ("down_proj" in name, list(tensors).index(name)))
    ordered = [name for name in ordered if "experts" not in name] + sorted(
        (name for name in ordered if "experts" in name), key=lambda name: int(name.split(".")[5])
    )
    for name in ordered:
        expected.add(name, tensors[name])
        assert held_bytes(expected) == 0


def test_a_tied_engine_has_no_output_layer_of_its_own() -> None:
    tensors = {name: distinct(VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    for tied in (True, False):
        (found,) = results(tensors, config(tie_word_embeddings=tied), 1)
        assert ("lm_head.weight" in found) is not tied


# --- refusals -----------------------------------------------------------------------------------------------


def test_a_fused_parameter_that_never_became_whole_is_named() -> None:
    expected = ExpectedChecksums(config(), EngineParallel(), dtype=torch.bfloat16)
    expected.add("model.layers.3.mlp.gate_proj.weight", distinct(32, HIDDEN))
    with pytest.raises(WeightsError, match=r"model\.layers\.3\.mlp\.gate_up_proj\.weight"):
        expected.result()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate.weight",
        "model.rotary.weight",
        "visual.blocks.0.weight",
        "model.layers.0.input_layernorm.bias",
    ],
)
def test_a_tensor_without_a_place_is_named(name: str) -> None:
    with pytest.raises(WeightsError, match=f"{name}: an SGLang engine of LlamaForCausalLM has no place"):
        ExpectedChecksums(config(), EngineParallel(), dtype=torch.bfloat16).add(name, distinct(8))


def test_silently_dropped_dense_layer_is_refused() -> None:
    expected = ExpectedChecksums(config("Qwen3MoeForCausalLM"), EngineParallel(), dtype=torch.bfloat16)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.gate_proj\.weight"):
        expected.add("model.layers.1.mlp.gate_proj.weight", distinct(32, HIDDEN))


def test_an_expert_beyond_the_last_is_named() -> None:
    expected = ExpectedChecksums(config("MixtralForCausalLM"), EngineParallel(), dtype=torch.bfloat16)
    with pytest.raises(WeightsError, match=r"experts\.3\.w1\.weight"):
        expected.add("model.layers.0.block_sparse_moe.experts.3.w1.weight", distinct(32, HIDDEN))


@pytest.mark.parametrize("again", ["q", "k", "v"])
def test_repeated_tensor_is_named_wherever_it_stands(again: str) -> None:
    expected = ExpectedChecksums(config(), EngineParallel(), dtype=torch.bfloat16)
    for name in {"q": "q", "k": "k", "v": "qkv"}[again]:  # taken, waiting, whole
        expected.add(f"model.layers.0.self_attn.{name}_proj.weight", distinct(8, HIDDEN))
    with pytest.raises(WeightsError, match=f"{again}_proj.weight was added twice"):
        expected.add(f"model.layers.0.self_attn.{again}_proj.weight", distinct(8, HIDDEN))


def test_what_does_not_divide_on_a_gpu_is_named_with_its_shape() -> None:
    expected = ExpectedChecksums(config(), EngineParallel(3), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(WeightsError, match=r"down_proj\.weight \(8, 40\): 40 does not divide"):
        expected.add("model.layers.0.mlp.down_proj.weight", distinct(8, 40))


def test_wrong_waiting_tensor_is_named_not_the_last() -> None:
    expected = ExpectedChecksums(config(), EngineParallel(), dtype=torch.bfloat16)
    expected.add("model.layers.2.self_attn.k_proj.weight", distinct(7, HIDDEN))
    with pytest.raises(WeightsError, match=r"2\.self_attn\.k_proj\.weight \(7, 8\)"):
        expected.add("model.layers.2.self_attn.q_proj.weight", distinct(8, HIDDEN))


def test_heads_that_a_tensor_does_not_hold_are_named() -> None:
    expected = ExpectedChecksums(config(), EngineParallel(), dtype=torch.bfloat16)
    with pytest.raises(
        WeightsError, match=r"o_proj\.weight \(8, 7\): its dimension 1 has size 7, which 4 heads do not divide"
    ):
        expected.add("model.layers.0.self_attn.o_proj.weight", distinct(8, 7))


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel"):
        ExpectedChecksums(config("GPT2LMHeadModel"), EngineParallel(), dtype=torch.bfloat16)
