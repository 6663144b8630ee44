"""Memory and operations of adapters on a frozen base, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncrl.extensions.plan.activations import Recompute, Training, activations, layer_bytes
from asyncrl.extensions.plan.adapters import Adapters
from asyncrl.extensions.plan.estimate import ModelSize
from asyncrl.extensions.plan.memory import (
    away,
    cache_that_fits,
    checkpoint_bytes,
    engine_rank,
    packed_base_bytes,
    saved_bytes,
    trainer_rank,
    turns,
)
from asyncrl.extensions.plan.shapes import ParallelLayout, Shape, held, parameters
from asyncrl.extensions.plan.tensors import Weight

LAYERS, HIDDEN, KEYS, INNER, RANK = 4, 128, 64, 256, 2
SHAPE = Shape(LAYERS, HIDDEN, queries=HIDDEN, keys=KEYS, values=KEYS, inner=INNER, vocab=10, cached=128, cache_heads=1)
LINEARS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
WEIGHTS = [
    Weight("model.embed_tokens.weight", (10, HIDDEN)),
    Weight("model.norm.weight", (HIDDEN,)),
    Weight("lm_head.weight", (10, HIDDEN)),
    *(
        Weight(f"model.layers.{n}.{name}.weight", size)
        for n in range(LAYERS)
        for name, size in {**LINEARS, "input_layernorm": (HIDDEN,)}.items()
    ),
]
LORA = Adapters(RANK)
MINE = LAYERS * RANK * sum(map(sum, LINEARS.values()))
"""Parameters of the adapters: rank * (inputs + outputs) of each linear layer."""
TRAINING = Training(dtype="bfloat16", tokens=100, logit_rows=10, adapters=LORA)
ONE = ParallelLayout()


def rank(layout: ParallelLayout = ONE, **changes: object) -> dict[str, int]:
    return trainer_rank(WEIGHTS, SHAPE, layout, replace(TRAINING, **changes))  # type: ignore[arg-type]


def test_trained_weights_have_gradients_and_the_base_none() -> None:
    parts = rank()
    sizes = ("weights", "gradients", "masters", "moments")
    assert [parts[name] for name in sizes] == [2 * MINE, 4 * MINE, 4 * MINE, 8 * MINE]
    assert parts["frozen base"] == 2 * parameters(WEIGHTS).all
    assert rank(dtype="float32")["masters"] == 0


def test_reset_copies_adapters_and_a_critic_has_its_base() -> None:
    """In place of its output layer the critic trains a value head."""
    plain, more = rank(), rank(frozen=1, critic=True)
    assert more["frozen weights"] == plain["weights"]
    assert more["frozen base"] == 2 * plain["frozen base"] - 2 * 10 * HIDDEN
    assert more["moments"] == 8 * (2 * MINE + HIDDEN + 1)


def test_tensor_parallel_ranks_share_one_matrix_of_each_adapter() -> None:
    """The outputs of column-parallel layers, and the inputs of row-parallel ones."""
    split = {name: size[1] if name.endswith(("o_proj", "down_proj")) else size[0] for name, size in LINEARS.items()}
    shared = LAYERS * RANK * sum(split.values())
    two = replace(SHAPE, cache_heads=2)
    found = trainer_rank(WEIGHTS, two, ParallelLayout(tensor=2), TRAINING)
    assert found["weights"] == 2 * (MINE - shared + shared // 2)
    # with one key-value head, both ranks hold the outputs of queries, keys and values
    whole = LAYERS * RANK * (HIDDEN + 2 * KEYS)
    assert rank(ParallelLayout(tensor=2))["weights"] == found["weights"] + 2 * whole // 2
    assert rank(ParallelLayout(data=2))["moments"] == 8 * MINE // 2


def test_experts_share_gate_and_up_and_routers_adapt_nothing() -> None:
    expert = [
        Weight(f"model.layers.0.mlp.experts.{n}.{name}.weight", size)
        for n in range(4)
        for name, size in (("gate_proj", (16, 8)), ("up_proj", (16, 8)), ("down_proj", (8, 16)))
    ]
    sparse = [*expert, Weight("model.layers.0.mlp.gate.weight", (4, 8))]
    assert parameters(LORA.matrices(sparse)).routed == 4 * RANK * ((8 + 2 * 16) + (16 + 8))
    assert parameters(LORA.matrices(sparse)).dense == 0
    mine = held(LORA.matrices(sparse), SHAPE, ParallelLayout(tensor=2, data=2, expert=2, expert_tensor=2), 0)
    assert mine.routed == 2 * RANK * ((8 + 16) + (8 + 8))
    assert not Adapters(RANK, ("gate_proj",)).matrices(expert)  # whose name is gate_up_proj
    stacks = {"gate_up_proj": (4, 8, 32), "gate_up_proj_bias": (4, 32), "down_proj": (4, 16, 8)}
    stacked = [Weight(f"model.layers.0.mlp.experts.{name}", size) for name, size in stacks.items()]
    assert parameters(LORA.matrices(stacked)) == parameters(LORA.matrices(expert))
    assert held(LORA.matrices(stacked), SHAPE, ParallelLayout(tensor=2, data=2, expert=2, expert_tensor=2), 0) == mine


def test_frozen_layer_keeps_no_input_and_an_adapted_one_two() -> None:
    fused = replace(TRAINING, fused_norms=True)
    whole = layer_bytes(SHAPE, ONE, replace(fused, adapters=None), routed=False)
    assert layer_bytes(SHAPE, ONE, fused, routed=False) == whole + 2 * 7 * RANK
    values = replace(fused, adapters=Adapters(RANK, ("v_proj",)))
    # neither the input of the MLP nor that of its last layer; that of the output projection is attention's output
    assert layer_bytes(SHAPE, ONE, values, routed=False) == whole + 2 * RANK - 2 * (HIDDEN + INNER)
    dropped = replace(fused, adapters=replace(LORA, dropout=True))
    assert layer_bytes(SHAPE, ONE, dropped, routed=False) == whole + 2 * 7 * RANK + 3 * HIDDEN + INNER


def test_rows_are_gathered_between_column_parallel_matrices() -> None:
    layout, fused = ParallelLayout(tensor=2, sequence=True), replace(TRAINING, fused_norms=True)
    whole, more = (layer_bytes(SHAPE, layout, replace(fused, adapters=one), routed=False) for one in (None, LORA))
    assert more == whole + 2 * RANK * (5 + 2 / 2)
    buffers = [rank(layout, adapters=one)["gather buffer"] for one in (None, LORA)]
    assert buffers == [100 * HIDDEN * 2, 0]  # Megatron's function for frozen weights has none


def test_stacked_matrices_are_kept_per_micro_batch() -> None:
    """Those of queries, keys and values, and of gate and up."""
    stacked = 2 * (3 * RANK * (HIDDEN + HIDDEN + 2 * KEYS) + 2 * RANK * (HIDDEN + 2 * INNER))
    for layout, layers in ((ONE, LAYERS), (ParallelLayout(pipeline=2), 2 * LAYERS // 2)):
        none = replace(TRAINING, tokens=0)
        assert activations(SHAPE, layout, none, 0) == layers * stacked
        assert activations(SHAPE, layout, replace(none, recompute=Recompute("full")), 0) == stacked


def test_adapter_version_needs_no_bucket_of_its_own() -> None:
    assert rank(bucket=64)["publish buckets"] == 128
    assert rank(bucket=64, versions=True)["publish buckets"] == 0
    packed = replace(LORA, base_bytes=0.53125)
    assert rank(versions=True, adapters=packed)["publish buckets"] == 2 * parameters(WEIGHTS).all


@pytest.mark.parametrize("size", [0.53125, 1.03125])
def test_quantized_base_holds_codes_and_scales(size: float) -> None:
    linears = LAYERS * sum(rows * columns for rows, columns in LINEARS.values())
    rest = parameters(WEIGHTS).all - linears
    packed = round(linears * size)
    training = replace(TRAINING, adapters=replace(LORA, base_bytes=size))
    assert rank(adapters=training.adapters)["frozen base"] == 2 * rest + packed
    assert packed_base_bytes(WEIGHTS, training) == packed
    values = replace(LORA, base_bytes=size, targets=("v_proj",))
    of_values = LAYERS * KEYS * HIDDEN
    assert packed_base_bytes(WEIGHTS, replace(training, adapters=values)) == round(of_values * packed / linears)


def test_a_checkpoint_and_an_hf_folder_hold_the_adapters_alone() -> None:
    assert checkpoint_bytes(WEIGHTS, SHAPE, TRAINING) == 12 * MINE
    assert saved_bytes(WEIGHTS, TRAINING) == 4 * MINE
    assert saved_bytes(WEIGHTS, replace(TRAINING, adapters=None)) == 2 * parameters(WEIGHTS).all
    assert packed_base_bytes(WEIGHTS, TRAINING) == 0


def test_roles_with_adapters_multiply_all_but_the_base() -> None:
    one, two = (replace(TRAINING, adapters=replace(LORA, count=count)) for count in (1, 2))
    before, after = (rank(adapters=training.adapters) for training in (one, two))
    for part in ("weights", "gradients", "masters", "moments"):
        assert after[part] == 2 * before[part]
    assert after["frozen base"] == before["frozen base"]
    assert after["activations"] == before["activations"]
    assert checkpoint_bytes(WEIGHTS, SHAPE, two) == 2 * checkpoint_bytes(WEIGHTS, SHAPE, one)
    assert saved_bytes(WEIGHTS, two) == 2 * saved_bytes(WEIGHTS, one)
    with_critic = [rank(adapters=training.adapters, critic=True) for training in (one, two)]
    for part in ("weights", "gradients", "masters", "moments"):  # one critic for all roles
        assert with_critic[1][part] - with_critic[0][part] == after[part] - before[part]


def test_engine_has_a_slot_with_all_projections_per_adapter() -> None:
    """As SGLang's LoRAMemoryPool: the input matrices are whole on each rank, except those of row-parallel layers, and
    keys and values are repeated on ranks beyond the heads."""
    part = {"dtype": "bfloat16", "tokens": 1, "adapters": LORA}
    assert engine_rank(WEIGHTS, SHAPE, tensor=1, slots=5, **part)["adapters"] == 5 * 2 * MINE  # type: ignore[arg-type]
    two = engine_rank(WEIGHTS, SHAPE, tensor=2, slots=1, **part)["adapters"]  # type: ignore[arg-type]
    a = 5 * HIDDEN + HIDDEN // 2 + INNER // 2
    b = HIDDEN // 2 + 2 * KEYS + HIDDEN + 2 * INNER // 2 + HIDDEN
    assert two == 2 * LAYERS * RANK * (a + b)
    values = engine_rank(WEIGHTS, SHAPE, tensor=1, slots=1, **part | {"adapters": Adapters(RANK, ("v_proj",))})  # type: ignore[arg-type]
    assert values["adapters"] == 2 * LAYERS * RANK * (3 * HIDDEN + HIDDEN + 2 * KEYS)
    room = {"tensor": 1, "dtype": "bfloat16", "adapters": LORA, "slots": 5}
    tokens = cache_that_fits(WEIGHTS, SHAPE, 4_000_000, **room)
    assert sum(engine_rank(WEIGHTS, SHAPE, **room, tokens=tokens).values()) <= 4_000_000  # type: ignore[arg-type]


def test_the_base_leaves_a_shared_gpu_and_returns_for_a_publish() -> None:
    trainer, engine = rank(bucket=64), engine_rank(WEIGHTS, SHAPE, tensor=1, dtype="bfloat16", tokens=9)
    found = turns(trainer, engine)
    assert sum(found["publish"].values()) == (
        engine["weights"] + trainer["weights"] + trainer["frozen base"] + trainer["publish buckets"]
    )
    assert "frozen base" not in found["generate"]
    assert away(trainer) == (2 + 4 + 8) * MINE + trainer["frozen base"]


def test_a_frozen_base_saves_the_product_for_its_gradient() -> None:
    """A third of the operations, less those of the adapters."""
    model = ModelSize.of(WEIGHTS, SHAPE, LORA)
    plain = ModelSize.of(WEIGHTS, SHAPE)
    assert model.adapters == MINE
    assert model.training(10, 3) == pytest.approx(plain.training(10, 3) * 2 / 3 + 6 * MINE * 10)
