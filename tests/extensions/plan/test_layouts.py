"""What the trainer's communication costs, computed by hand from the models' published dimensions."""

from __future__ import annotations

import pytest

from asyncrl.extensions.plan.activations import Recompute, Training
from asyncrl.extensions.plan.layouts import TrainerLayouts
from asyncrl.extensions.plan.shapes import ParallelLayout, counted, shape_of
from asyncrl.extensions.plan.sizing import Hardware
from asyncrl.extensions.plan.tensors import tensors
from scripts import sizes

H100 = Hardware()
NVLINK, NETWORK, PRODUCTS = (one * H100.share for one in (H100.inside, H100.between, H100.flops))
TOKENS = 1e15  # of a batch: the idle time of pipelines is 0


def seconds(name: str, layout: ParallelLayout, *, recomputes: bool = False) -> float:
    """Return the seconds of a GPU for a token."""
    hf = sizes.MODELS[name]
    shape = shape_of(hf)
    weights = counted(tensors(hf), shape)
    training = Training("bfloat16", 4096, 1024, recompute=Recompute("full" if recomputes else "none"))
    return 1 / TrainerLayouts(hf, shape, weights, H100).speed(layout, training, TOKENS).rate


@pytest.mark.parametrize("ranks", [2, 8])
def test_tensor_parallelism_costs_what_does_not_overlap(ranks: int) -> None:
    """Qwen3-8B: 36 layers of attention and MLP, 4,096 numbers of 2 bytes for a token, of which a rank gathers or
    scatters (n - 1)/n; queries, keys and values are 6,144 numbers, gate and up 24,576."""
    one, divided = (seconds("qwen3_8b", ParallelLayout(each, sequence=each > 1)) for each in (1, ranks))
    moved = 36 * 2 * (ranks - 1) * 4096 * 2 / NVLINK
    product = 2 * 36 * 4096 * (6144 + 24_576) / PRODUCTS
    assert (moved > product) == (ranks == 8)  # with eight ranks the products are too short to hide all of it
    assert divided - one == pytest.approx(3 * moved + 2 * max(0.0, moved - product), rel=1e-6)


def test_recomputed_activations_gather_and_scatter_once_more() -> None:
    def cost(*, recomputes: bool) -> float:
        one, two = (
            seconds("qwen3_8b", ParallelLayout(each, sequence=each > 1), recomputes=recomputes) for each in (1, 2)
        )
        return two - one

    assert cost(recomputes=True) == pytest.approx(5 / 3 * cost(recomputes=False), rel=1e-6)


def test_expert_layers_gather_and_scatter_for_attention() -> None:
    """Qwen3-30B-A3B: 48 sparse layers of 2,048 numbers."""
    one, two = (seconds("qwen3_30b_a3b", ParallelLayout(each, sequence=each > 1)) for each in (1, 2))
    moved = 48 * 2048 * 2 / NVLINK
    assert two - one == pytest.approx(3 * moved, rel=1e-6)


def test_exchanges_of_experts_do_not_overlap() -> None:
    """Each token goes to 8 experts and back, forward and backward; 7 of 8 are on another GPU."""
    one, eight = (seconds("qwen3_30b_a3b", ParallelLayout(data=8, expert=each)) for each in (1, 8))
    assert eight - one == pytest.approx(48 * 4 * 8 * 2048 * 2 * 7 / 8 / NVLINK, rel=1e-6)


def test_stages_send_activations_and_gradients_without_overlap() -> None:
    one, two = (seconds("qwen3_8b", ParallelLayout(pipeline=stages, data=16 // stages)) for stages in (1, 2))
    assert two - one == pytest.approx(2 * 4096 * 2 / NETWORK, rel=1e-3)
