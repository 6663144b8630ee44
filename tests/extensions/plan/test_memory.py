"""The memory plan of a rank agrees with the real tiny model, the trainer's own tables, and layouts computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.extensions.plan.activations import Recompute, Training, activations, layer_bytes
from asyncrl.extensions.plan.memory import (
    _stage,
    away,
    cache_that_fits,
    checkpoint_bytes,
    checkpoint_staging,
    engine_rank,
    offloaded,
    trainer_rank,
    turns,
)
from asyncrl.extensions.plan.settings import layout_of
from asyncrl.extensions.plan.shapes import ParallelLayout, RankParameters, Shape, counted, held, of_stage, parameters
from asyncrl.extensions.plan.tensors import Weight
from asyncrl.launch.checks.model_files import read_model
from asyncrl.models import catalog
from asyncrl.parallel import PipelineSplit
from asyncrl.weights.mapping import tables
from tests.fakes import tiny_config

SHAPE = Shape(layers=4, hidden=8, queries=8, keys=4, values=4, inner=16, vocab=10, cached=8, cache_heads=2)
TRAINING = Training(dtype="bfloat16", tokens=100, logit_rows=10)


def model(experts: int = 0, tied: bool = False) -> list[Weight]:
    """Four layers of an attention matrix, a norm, and an MLP or a router with experts."""
    found = [Weight("model.embed_tokens.weight", (10, 8)), Weight("model.norm.weight", (8,))]
    found += [] if tied else [Weight("lm_head.weight", (10, 8))]
    for layer in range(4):
        at = f"model.layers.{layer}."
        found += [Weight(at + "self_attn.q_proj.weight", (8, 8)), Weight(at + "input_layernorm.weight", (8,))]
        found += [Weight(at + f"mlp.experts.{one}.up_proj.weight", (16, 8)) for one in range(experts)]
        found += (
            [Weight(at + "mlp.gate.weight", (experts, 8))] if experts else [Weight(at + "mlp.up_proj.weight", (16, 8))]
        )
    return found


@pytest.fixture(scope="module")
def tiny() -> list[Weight]:
    files = read_model(catalog.resolve("builtin:tiny"), "model.path")
    return [Weight(*one) for one in files.weights.items()]


TINY = Shape(layers=2, hidden=64, queries=64, keys=64, values=64, inner=256, vocab=16, cached=128)


def test_bytes_of_the_tiny_model_are_those_of_its_file(tiny: list[Weight]) -> None:
    file: Path = catalog.resolve("builtin:tiny") / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    parts = trainer_rank(counted(tiny, TINY), TINY, ParallelLayout(), replace(TRAINING, dtype="float32"))
    assert parts["weights"] == file.stat().st_size - header
    assert (parts["gradients"], parts["moments"]) == (parts["weights"], 2 * parts["weights"])
    assert parts["masters"] == 0  # in float32 a weight is its own


def test_mixed_precision_holds_eighteen_bytes_for_each_parameter(tiny: list[Weight]) -> None:
    parts = trainer_rank(tiny, TINY, ParallelLayout(), TRAINING)
    lasting = sum(parts[name] for name in ("weights", "gradients", "masters", "moments"))
    assert lasting == 18 * parameters(tiny).all  # 2 + 4 + 4 + 8


@pytest.mark.parametrize("family", sorted(tables()))
def test_what_ranks_share_is_what_the_tables_of_weights_split(family: str) -> None:
    for rule in tables()[family]:
        for name in rule.hf:
            assert Weight(name, (1,)).whole != rule.layout.split, name
            assert Weight(name, (1,)).routed == rule.routed, name


def test_tensor_ranks_share_matrices_and_pad_the_vocabulary() -> None:
    whole, half = (held(model(), SHAPE, ParallelLayout(tensor=degree), 0).dense for degree in (1, 4))
    norms = 5 * 8
    assert whole == 2 * 80 + norms + 4 * (64 + 128)
    assert half == 2 * 3 * 8 + norms + 4 * (16 + 32)  # 10 tokens on 4 ranks: 3 each


@pytest.mark.parametrize(("chunks", "stages"), [(1, [0, 0, 1, 1]), (2, [0, 1, 0, 1])])
def test_layers_stand_on_the_stages_that_megatron_gives_them(chunks: int, stages: list[int]) -> None:
    layout = ParallelLayout(pipeline=2, chunks=chunks)
    layers = [Weight(f"model.layers.{number}.mlp.up_proj.weight", (1, 1)) for number in range(4)]
    found = {one.layer: stage for stage in (0, 1) for one in of_stage(layers, replace(SHAPE, layers=4), layout, stage)}
    assert [found[layer] for layer in range(4)] == stages


@given(st.sampled_from([1, 2, 4]), st.booleans())
def test_stages_hold_every_parameter_and_tied_ones_twice(stages: int, tied: bool) -> None:
    shape, weights = replace(SHAPE, tied=tied), model(tied=tied)
    layout = ParallelLayout(pipeline=stages)
    total = sum(held(weights, shape, layout, stage).all for stage in range(stages))
    assert total == parameters(weights).all + (80 if tied and stages > 1 else 0)


def test_experts_are_shared_by_their_ranks_routers_by_none() -> None:
    layout = ParallelLayout(tensor=2, data=4, expert=4, expert_tensor=1)
    mine = held(model(experts=8), SHAPE, layout, 0)
    assert mine.routed == 4 * 8 * 128 // 4
    assert mine.dense == 2 * 5 * 8 + 5 * 8 + 4 * (32 + 8 * 8)
    assert (layout.replicas, layout.expert_replicas) == (4, 2)
    split = replace(layout, expert=2, expert_tensor=2)  # as many ranks, each with half of twice as many
    assert held(model(experts=8), SHAPE, split, 0) == mine


def test_latent_down_projections_are_shared_only_without_te() -> None:
    weights = [Weight("model.layers.0.self_attn.q_a_proj.weight", (8, 8))]
    for layers, expected in (("local", 32), ("transformer_engine", 64)):
        trainer = tiny_config(**{"trainer.tensor_parallel": 2, "trainer.layers": layers}).trainer
        assert held(weights, SHAPE, layout_of(trainer), 0).dense == expected


def test_replicas_share_masters_and_moments_and_nothing_else() -> None:
    alone, four = (trainer_rank(model(), SHAPE, ParallelLayout(data=degree), TRAINING) for degree in (1, 4))
    context = trainer_rank(model(), SHAPE, ParallelLayout(context=4), TRAINING)  # its ranks are replicas, too
    for name in ("masters", "moments"):
        assert four[name] == context[name] == alone[name] // 4
    for name in ("weights", "gradients", "activations", "logits", "publish buckets"):
        assert four[name] == alone[name]


def test_masters_of_experts_are_shared_by_replicas() -> None:
    """Half as many, where expert parallelism takes ranks that are replicas of all else, and tensor parallelism gives
    its own."""
    layout, weights = ParallelLayout(tensor=2, data=4, expert=4), model(experts=8)
    mine = held(weights, SHAPE, layout, 0)
    assert trainer_rank(weights, SHAPE, layout, TRAINING)["masters"] == 4 * (mine.dense // 4 + mine.routed // 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_a_value_head_in_place_of_the_output_layer(tied: bool) -> None:
    """On the last stage it holds neither the output layer nor a copy of the embedding."""
    shape, alone = replace(SHAPE, tied=tied), ParallelLayout()
    for layout in (alone, ParallelLayout(pipeline=2)):
        plain, more = (
            trainer_rank(model(tied=tied), shape, layout, replace(TRAINING, critic=one)) for one in (False, True)
        )
        elements = parameters(model(tied=True)).all + 9 if layout == alone else 2 * (64 + 8 + 128) + 8 + 9
        if plain["logits"] == 0:  # the first stage holds most
            elements = 2 * (64 + 8 + 128) + 80
        for name, size in (("weights", 2), ("gradients", 4), ("masters", 4), ("moments", 8)):
            assert more[name] == plain[name] + size * elements


def test_frozen_weights_come_once_each_and_the_critic_has_none() -> None:
    plain, more = (
        trainer_rank(model(), SHAPE, ParallelLayout(), t) for t in (TRAINING, replace(TRAINING, critic=True, frozen=2))
    )
    assert more["frozen weights"] == 2 * plain["weights"]


def test_sequence_parallelism_keeps_a_buffer_of_all_rows() -> None:
    for layout, rows in (
        (ParallelLayout(tensor=2), 0),
        (ParallelLayout(tensor=2, sequence=True), 100),
        (ParallelLayout(tensor=2, sequence=True, context=2), 50),
    ):
        assert trainer_rank(model(), SHAPE, layout, TRAINING)["gather buffer"] == rows * 8 * 2


def test_fp8_keeps_two_more_bytes_per_matrix_element() -> None:
    plain, more = (
        trainer_rank(model(), SHAPE, ParallelLayout(tensor=2), replace(TRAINING, fp8=on)) for on in (False, True)
    )
    assert plain["weights in FP8"] == 0
    assert more["weights in FP8"] == 2 * 4 * (8 * 8 + 16 * 8) // 2
    assert {**more, "weights in FP8": 0} == plain


def test_stream_has_two_buckets_no_larger_than_the_weights() -> None:
    total = parameters(model()).all * 2
    sizes = [
        trainer_rank(model(), SHAPE, ParallelLayout(), replace(TRAINING, bucket=size))["publish buckets"]
        for size in (0, 100, 1 << 30)
    ]
    assert sizes == [total, 200, total]


def test_nothing_is_kept_for_publishes_where_there_are_none() -> None:
    assert trainer_rank(model(), SHAPE, ParallelLayout(), replace(TRAINING, publishes=False))["publish buckets"] == 0


def test_plain_activations_are_the_papers_with_our_mlp() -> None:
    """Korthikanti et al., section 4.1, per token in units of the hidden size h at 16 bits: attention 2 (input of its
    projections) + 6 (queries, keys, values) + 2 (what it gives), two norms 4, the MLP's input 2. A gated MLP of inner
    size f keeps 3 f more; and our rotation writes queries and keys anew, 4."""
    h, f = 64, 256
    plain, fused = Shape(1, h, queries=h, keys=h, values=h, inner=f, vocab=16), replace(TRAINING, fused_norms=True)
    assert layer_bytes(plain, ParallelLayout(), fused, routed=False) == (2 + 6 + 2 + 4 + 2 + 4) * h + 2 * 3 * f
    apart = layer_bytes(plain, ParallelLayout(), TRAINING, routed=False)
    assert apart == layer_bytes(plain, ParallelLayout(), fused, routed=False) + 2 * (8 - 2) * h
    normed = replace(plain, normed=True)  # of queries and keys: fused ones keep their input, which is counted
    assert layer_bytes(normed, ParallelLayout(), fused, routed=False) == layer_bytes(
        plain, ParallelLayout(), fused, routed=False
    )
    assert layer_bytes(normed, ParallelLayout(), TRAINING, routed=False) == apart + 8 * (h + h)


def test_activations_shrink_by_what_the_layout_divides() -> None:
    def of(layout: ParallelLayout, stage: int = 0) -> float:
        return activations(SHAPE, layout, TRAINING, stage)

    gathered = TRAINING.tokens // 2 * 4 * (SHAPE.keys + SHAPE.values) * 2
    assert of(ParallelLayout(context=2)) == of(ParallelLayout()) / 2 + gathered
    assert of(ParallelLayout(tensor=2, sequence=True)) == of(ParallelLayout()) / 2  # section 4.2.2: everything is split
    assert (
        of(ParallelLayout()) / 2 < of(ParallelLayout(tensor=2)) < of(ParallelLayout())
    )  # without it the hidden rows are not
    last_norm = TRAINING.tokens * SHAPE.hidden * (2 + 8)
    layers = of(ParallelLayout()) - last_norm
    # the first stage has as many micro-batches as there are stages
    assert of(ParallelLayout(pipeline=4)) == layers
    assert of(ParallelLayout(pipeline=4), 3) == layers / 4 + last_norm
    assert of(ParallelLayout(pipeline=2, chunks=2)) == layers * 1.25
    uneven = ParallelLayout(pipeline=2, split=PipelineSplit(2, first=3))
    assert of(uneven) == 2 * layers * 3 / 4
    assert of(uneven, 1) == layers / 4 + last_norm


def test_ranks_beyond_key_value_heads_keep_all_projections() -> None:
    """Megatron gathers queries, keys and values, and each rank takes its queries and one head of keys and values."""
    layout, heads = ParallelLayout(tensor=4), replace(SHAPE, cache_heads=4)
    split, whole = (layer_bytes(shape, layout, TRAINING, routed=False) for shape in (heads, SHAPE))
    assert whole - split == 2 * ((8 + 4 + 4) * 3 / 4 + 4 / 2 - 4 / 4)


def test_recomputed_activations_are_kept_for_one_unit_at_a_time() -> None:
    def of(**recompute: Any) -> float:
        return activations(SHAPE, ParallelLayout(), replace(TRAINING, recompute=Recompute(**recompute)), 0)

    last_norm, inputs = TRAINING.tokens * SHAPE.hidden * (2 + 8), TRAINING.tokens * SHAPE.hidden * 2
    layer = (of() - last_norm) / 4
    assert of(granularity="full") == 4 * inputs + layer + last_norm
    assert of(granularity="full", num_layers=2) == 2 * inputs + 2 * layer + last_norm
    assert of(granularity="full", method="block") == inputs + 3 * layer + layer + last_norm
    mlp = TRAINING.tokens * 3 * SHAPE.inner * 2
    assert of(granularity="selective", modules=("mlp",)) == of() - 3 * mlp
    assert of(granularity="selective", modules=("core_attn",)) == of()


def test_offloaded_states_return_when_activations_are_gone() -> None:
    plain = trainer_rank(model(), SHAPE, ParallelLayout(), TRAINING)
    away = trainer_rank(model(), SHAPE, ParallelLayout(), replace(TRAINING, offload=True))
    states = plain["masters"] + plain["moments"]
    assert offloaded(model(), SHAPE, ParallelLayout(), replace(TRAINING, offload=True)) == states
    assert offloaded(model(), SHAPE, ParallelLayout(), TRAINING) == 0
    rest = sum(plain.values()) - states - plain["activations"] - plain["logits"]
    assert sum(away.values()) == rest + max(states, plain["activations"] + plain["logits"])


def test_a_routed_token_pays_for_each_of_its_experts() -> None:
    """Each copy of a token keeps its input of width h, gate and up, and their product before and after the router's
    scale; the shared experts keep gate, up, the activated gate, and the product of both."""
    sparse = replace(SHAPE, sparse=4, chosen=2, expert_inner=4, shared_inner=3)
    dense = layer_bytes(SHAPE, ParallelLayout(), TRAINING, routed=False) - 2 * 3 * SHAPE.inner
    kept = layer_bytes(sparse, ParallelLayout(), TRAINING, routed=True)
    assert kept == dense + 2 * (2 * (8 + 4 * 4) + 5 * 3) + 2 * 16
    router = layer_bytes(replace(sparse, experts=8), ParallelLayout(), TRAINING, routed=True) - kept
    assert router == 8 * 3 * 4
    # two ranks that share each expert read all tokens of both, and each writes half of what is inside
    layout = ParallelLayout(tensor=2, expert_tensor=2, sequence=True)
    more = layer_bytes(sparse, layout, TRAINING, routed=True) - layer_bytes(
        replace(SHAPE, inner=0), layout, TRAINING, routed=False
    )
    assert more == 2 * (2 * (8 + 4 * 4 / 2) + 5 * 3 / 2) + 2 * 16 / 2


def test_latent_attention_keeps_copies_and_normalized_vectors() -> None:
    """Without the projections that plain attention keeps besides; on a CPU values and output are as wide as keys."""
    plain = replace(SHAPE, keys=8)
    latent, fused = replace(plain, latent=5), replace(TRAINING, fused_norms=True)
    both = [layer_bytes(shape, ParallelLayout(), fused, routed=False) for shape in (plain, latent)]
    assert both[0] - both[1] == 2 * ((3 * 8 + 2 * 8 + 4) - (8 + 8 + 2 * 4)) - 2 * 2 * 5
    on_cpu = layer_bytes(latent, ParallelLayout(), TRAINING, routed=False)
    of_norms = 2 * (8 - 2) * 8 + (8 - 2) * 5  # two of the layer, and those of latent vectors
    assert on_cpu - both[1] == of_norms + 2 * ((8 + 8 + 2 * 8 + 4) - (8 + 8 + 2 * 4))


def test_the_stage_with_most_is_told() -> None:
    big = [*model(), Weight("model.layers.3.mlp.down_proj.weight", (1000, 1000))]
    last = trainer_rank(big, SHAPE, ParallelLayout(pipeline=2), TRAINING)
    assert last["weights"] > 2_000_000
    assert last["logits"] > 0
    big = [*model(), Weight("model.layers.0.mlp.down_proj.weight", (1000, 1000))]
    assert (
        trainer_rank(big, SHAPE, ParallelLayout(pipeline=2), TRAINING)["logits"] == 0
    )  # the last stage alone has them


def test_logits_are_a_chunk_over_a_ranks_vocabulary() -> None:
    one, two = (trainer_rank(model(), SHAPE, ParallelLayout(tensor=degree), TRAINING)["logits"] for degree in (1, 2))
    assert one == 10 * 10 * 12
    assert two == one // 2
    few = replace(TRAINING, tokens=16)  # on four ranks of a context fewer rows than a chunk has
    assert trainer_rank(model(), SHAPE, ParallelLayout(context=4), few)["logits"] == 4 * 10 * 12


def test_logits_take_the_memory_of_what_is_recomputed_later() -> None:
    plain = trainer_rank(model(), SHAPE, ParallelLayout(), TRAINING)["logits"]
    for vocab in (SHAPE.vocab, 10_000):
        shape = replace(SHAPE, vocab=vocab)
        full = replace(TRAINING, recompute=Recompute("full"))
        once = trainer_rank(model(), shape, ParallelLayout(), full)
        layer = layer_bytes(shape, ParallelLayout(), TRAINING, routed=False) * TRAINING.tokens
        assert once["logits"] == max(0, plain * vocab // SHAPE.vocab - layer)


def test_engine_holds_its_weights_and_the_cache_of_all() -> None:
    parts = engine_rank(model(), SHAPE, tensor=2, dtype="bfloat16", tokens=1000)
    assert parts["weights"] == 2 * held(model(), SHAPE, ParallelLayout(tensor=2), 0).all
    assert parts["KV cache"] == 1000 * 4 * 8 * 2 // 2
    sparse = engine_rank(model(experts=8), SHAPE, tensor=2, dtype="bfloat16", tokens=1)
    assert sparse["weights"] == 2 * held(model(experts=8), SHAPE, ParallelLayout(tensor=2, expert_tensor=2), 0).all
    latent = replace(SHAPE, cache_heads=1)
    assert engine_rank(model(), latent, tensor=2, dtype="bfloat16", tokens=1000)["KV cache"] == 1000 * 4 * 8 * 2
    assert engine_rank(model(), SHAPE, tensor=1, dtype="bfloat16", tokens=1, cache_dtype="fp8_e4m3")["KV cache"] == 32


def test_attention_replicas_repeat_weights_stages_share_them() -> None:
    engine = {"dtype": "bfloat16", "tokens": 1000}
    matrices = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    layers = [Weight(f"model.layers.{layer}.{name}.weight", (8, 8)) for layer in range(4) for name in matrices]
    alone = engine_rank(layers, SHAPE, tensor=4, **engine)  # type: ignore[arg-type]
    replicated = engine_rank(layers, SHAPE, tensor=4, replicas=2, **engine)  # type: ignore[arg-type]
    assert (alone["weights"], replicated["weights"]) == (4 * 3 * 16 * 2, 4 * (2 * 32 + 16) * 2)
    staged = engine_rank(layers, SHAPE, tensor=4, stages=2, **engine)  # type: ignore[arg-type]
    assert {name: 2 * size for name, size in staged.items()} == alone


def test_codes_halve_the_linear_maps_of_the_layers_alone() -> None:
    wide, codes = (
        engine_rank(model(experts=4), SHAPE, tensor=2, dtype="bfloat16", tokens=1, linear_bytes=size)
        for size in (None, 1)
    )
    kept = [
        one for one in model(experts=4) if one.layer is None or len(one.shape) == 1 or one.name.endswith(".gate.weight")
    ]
    outside = engine_rank(kept, SHAPE, tensor=2, dtype="bfloat16", tokens=1)["weights"]
    assert 2 * (codes["weights"] - outside) == wide["weights"] - outside > 0


def test_the_cache_that_fits_fills_the_room_beside_the_weights() -> None:
    part = {"tensor": 2, "dtype": "bfloat16"}
    tokens = cache_that_fits(model(), SHAPE, 10_000, **part)  # type: ignore[arg-type]
    assert sum(engine_rank(model(), SHAPE, **part, tokens=tokens).values()) <= 10_000  # type: ignore[arg-type]
    assert sum(engine_rank(model(), SHAPE, **part, tokens=tokens + 1).values()) > 10_000  # type: ignore[arg-type]


def test_ranks_beyond_the_key_value_heads_repeat_them() -> None:
    keys = [Weight("model.layers.0.self_attn.k_proj.weight", (8, 8))]
    sizes = [engine_rank(keys, SHAPE, tensor=tensor, dtype="bfloat16", tokens=1000) for tensor in (1, 2, 4)]
    assert [parts["weights"] for parts in sizes] == [128, 64, 64]
    assert [parts["KV cache"] for parts in sizes] == [64_000, 32_000, 32_000]


def test_checkpoint_takes_twelve_bytes_per_parameter() -> None:
    count = parameters(model()).all
    assert checkpoint_staging(model(), SHAPE, ParallelLayout(), TRAINING) == 12 * count
    of_critic = count - 80 + 9  # a value head in place of the output layer
    assert checkpoint_staging(model(), SHAPE, ParallelLayout(data=2), replace(TRAINING, critic=True)) == 12 * (
        count // 2 + 449
    )
    assert checkpoint_bytes(model(), SHAPE, replace(TRAINING, critic=True)) == 12 * (count + of_critic)


def test_vision_tower_is_on_the_first_stage() -> None:
    pytest.importorskip("asyncrl.extensions.vision")

    def stages(training: Training, tower: int = 1000) -> list[dict[str, int]]:
        layout = ParallelLayout(tensor=2, pipeline=2)
        return [_stage(model(), replace(SHAPE, tower=tower), layout, training, stage) for stage in (0, 1)]

    plain, frozen, trained = stages(TRAINING, 0), stages(TRAINING), stages(replace(TRAINING, tower=True))
    assert [stage["frozen base"] for stage in frozen] == [2000, 0]
    assert [stage["frozen base"] for stage in trained] == [0, 0]
    for part, each in (("weights", 2), ("gradients", 4), ("masters", 4), ("moments", 8), ("publish buckets", 2)):
        assert trained[0][part] - plain[0][part] == 1000 * each
        assert trained[1][part] == plain[1][part]
    engine = {"tensor": 2, "dtype": "bfloat16", "tokens": 0}
    with_tower = engine_rank(model(), replace(SHAPE, tower=1000), **engine)["weights"]
    assert with_tower - engine_rank(model(), SHAPE, **engine)["weights"] == 1000


def test_what_nobody_loads_is_not_counted() -> None:
    pytest.importorskip("asyncrl.extensions.vision")
    extra = [
        Weight("visual.patch_embed.proj.weight", (8, 3, 2, 14, 14)),
        Weight("model.layers.4.eh_proj.weight", (8, 16)),
        Weight("model.layers.0.self_attn.rotary_emb.inv_freq", (4,)),
        Weight("model.layers.0.mlp.gate.e_score_correction_bias", (2,)),
    ]
    assert counted([*model(), *extra], SHAPE) == model()
    assert counted(model(), replace(SHAPE, tied=True)) == model(tied=True)
    assert parameters(model(experts=2)) == RankParameters(2 * 80 + 5 * 8 + 4 * (64 + 16), 4 * 2 * 128)


def test_turns_on_a_shared_gpu_count_what_each_side_keeps() -> None:
    """A turn of the trainers counts nothing of the engine, and no other turn counts gradients, optimizer or
    activations."""
    weights = model()
    trainer = trainer_rank(weights, SHAPE, ParallelLayout(), replace(TRAINING, frozen=1, bucket=64))
    engine = engine_rank(weights, SHAPE, tensor=1, dtype="bfloat16", tokens=1000)
    found = turns(trainer, engine)
    assert found["train"] == trainer
    assert sum(found["generate"].values()) == sum(engine.values()) + trainer["publish buckets"]
    assert sum(found["publish"].values()) == engine["weights"] + trainer["weights"] + trainer["publish buckets"]
    assert away(trainer) == (2 + 4 + 8 + 2) * parameters(counted(weights, SHAPE)).all
