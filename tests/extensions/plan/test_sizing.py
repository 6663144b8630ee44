"""The arithmetic of a publish and of both sides' pace, against sums done by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.extensions.plan.engine import EngineShape
from asyncrl.extensions.plan.shapes import ParallelLayout, Shape, active
from asyncrl.extensions.plan.sizing import (
    FleetSpec,
    Hardware,
    Publish,
    balance,
    engine_shape,
    packed,
    publish,
    train_rate,
)
from asyncrl.extensions.plan.tensors import Weight
from asyncrl.weights.bucket import plan_buckets

SHAPE = Shape(layers=4, hidden=8, queries=8, keys=4, values=4, inner=16, vocab=10, cached=8)
PLAIN = Hardware(hbm=1e30, inside=100.0, between=10.0, share=1.0, call=0.0, tensor=0.0)
"""Bytes per second that can be reckoned with; copies take no time."""
MATRICES = [Weight(f"model.layers.{layer}.mlp.up_proj.weight", (10, 5)) for layer in range(4)]
"""Of 100 bytes each."""
EXPERTS = [Weight(f"model.layers.{layer}.mlp.experts.0.up_proj.weight", (10, 5)) for layer in range(4)]


def sent(weights: list[Weight] = MATRICES, layout: ParallelLayout | None = None, **changes: Any) -> Publish:
    settings: dict[str, Any] = {"dtype": "bfloat16", "bucket": 100, "streams": True, "one_machine": False}
    settings |= {"hardware": PLAIN} | changes
    return publish(weights, SHAPE, layout or ParallelLayout(), **settings)


def test_bytes_go_once_per_adapter_for_any_stages() -> None:
    for pipeline in (1, 2, 4):
        found = sent(layout=ParallelLayout(pipeline=pipeline))
        assert found == Publish(400, (4 // pipeline,) * pipeline, 0.0, pytest.approx(40.0))
    assert sent(one_machine=True).pause == pytest.approx(4.0)


def test_stream_waits_for_one_gather_and_hides_the_others() -> None:
    layout = ParallelLayout(
        tensor=2
    )  # one of two shards comes over 100 bytes a second: 0.5 s a bucket, and 10 s to send it
    assert sent(layout=layout).pause == pytest.approx(0.5 + 4 * 10)
    full = sent(layout=layout, streams=False)
    assert (full.fill, full.pause) == (pytest.approx(4 * 0.5), pytest.approx(40.0))
    assert full.seconds == full.fill + full.pause


def test_full_staging_fills_at_once_and_sends_in_turn() -> None:
    full = sent(layout=ParallelLayout(tensor=2, pipeline=2), streams=False)
    assert (full.fill, full.pause) == (pytest.approx(2 * 0.5), pytest.approx(40.0))


def test_later_stages_gather_first_while_others_send() -> None:
    layout = ParallelLayout(tensor=2, pipeline=2)  # 0.5 s to gather a bucket, and 10 s to send it
    assert sent(layout=layout).pause == pytest.approx(0.5 + 4 * 10)


def test_experts_of_other_machines_come_over_one_adapter() -> None:
    near, far = ParallelLayout(expert=8), ParallelLayout(expert=16)
    assert sent(EXPERTS, near, streams=False).fill == pytest.approx(400 * 7 / 8 / 100)
    assert sent(EXPERTS, far, streams=False).fill == pytest.approx(400 * (7 / 16 / 100 + 8 / 16 / 10))
    assert sent(MATRICES, far, streams=False).fill == pytest.approx(0)  # no expert, no tensor parallelism
    assert sent(EXPERTS, far, one_machine=False).pause == pytest.approx(100 * (7 / 1600 + 8 / 160) + 40)


def test_each_bucket_costs_a_call_and_each_tensor_a_load() -> None:
    slow = replace(PLAIN, call=1.0, tensor=0.1)
    assert sent(hardware=slow, bucket=200).pause == pytest.approx(40 + 2 * 1.0 + 4 * 0.1)
    assert sent(hardware=replace(PLAIN, hbm=100.0), streams=False).pause == pytest.approx(40 + 400 * 2 / 100)


def test_an_embedding_that_is_the_output_layer_is_sent_once() -> None:
    tied = replace(SHAPE, tied=True)
    weights = [Weight("model.embed_tokens.weight", (10, 5)), *MATRICES]
    found = publish(
        weights,
        tied,
        ParallelLayout(pipeline=2),
        dtype="bfloat16",
        bucket=100,
        streams=True,
        one_machine=False,
        hardware=PLAIN,
    )
    assert found.buckets == (3, 2)
    assert found.nbytes == 500


@given(sizes=st.lists(st.integers(1, 100), max_size=20), limit=st.integers(1, 120))
def test_buckets_hold_every_tensor_and_no_more_than_their_limit(sizes: list[int], limit: int) -> None:
    found = packed(sizes, limit)
    assert (sum(size for size, _ in found), sum(count for _, count in found)) == (sum(sizes), len(sizes))
    assert all(size <= limit or count == 1 for size, count in found)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 20))
def test_buckets_are_as_many_as_a_publish_plans(sizes: list[int], limit: int) -> None:
    tensors = [(str(number), torch.uint8, torch.Size([size])) for number, size in enumerate(sizes)]
    assert len(packed(sizes, limit)) == len(plan_buckets(tensors, limit))


@given(
    layout=st.builds(
        ParallelLayout, tensor=st.sampled_from([1, 8]), pipeline=st.sampled_from([1, 2]), expert=st.integers(1, 64)
    ),
    bucket=st.integers(50, 500),
    streams=st.booleans(),
)
def test_publish_is_bounded_by_its_link_and_monotone(layout: ParallelLayout, bucket: int, streams: bool) -> None:
    weights = [*MATRICES, *EXPERTS]
    found = sent(weights, layout, bucket=bucket, streams=streams)
    assert found.pause >= found.nbytes / PLAIN.between * (1 - 1e-9)
    faster = sent(weights, layout, bucket=bucket, streams=streams, hardware=replace(PLAIN, between=20.0))
    assert faster.seconds <= found.seconds * (1 + 1e-9)


def test_active_parameters_are_those_that_multiply_a_token() -> None:
    sparse = replace(SHAPE, sparse=1, experts=4, chosen=2, expert_inner=3)
    weights = [Weight("model.embed_tokens.weight", (10, 8)), Weight("lm_head.weight", (10, 8))]
    assert active(weights, SHAPE) == 80
    assert active(weights[:1], replace(SHAPE, tied=True)) == 80
    routed = [Weight(f"model.layers.0.mlp.experts.{one}.gate_up_down.weight", (9, 8)) for one in range(4)]
    assert active([*weights, *routed], sparse) == 80 + 2 * 3 * 3 * 8
    hardware = Hardware(flops=1000.0, mfu=0.6, sparse_mfu=0.5)
    assert train_rate(weights, SHAPE, hardware) == pytest.approx(0.6 * 1000 / (6 * 80))
    assert train_rate(weights, sparse, hardware) == pytest.approx(0.5 * 1000 / (6 * 80))


def test_engine_reads_weights_per_step_and_cache_per_request() -> None:
    rank, hardware = {"weights": 100, "KV cache": 400}, Hardware(hbm=10.0, share=1.0)
    assert engine_shape(rank, FleetSpec(1, 1, running=3, tokens=40), 10.0, hardware) == EngineShape(10.0, 10.0, 3)
    assert (
        engine_shape(rank, FleetSpec(1, 1, running=9, tokens=40), 10.0, hardware).max_running == 4
    )  # the cache is full


def test_both_sides_lose_a_publish_in_each_batch() -> None:
    fleet, engine = FleetSpec(2, 1, running=3, tokens=40), EngineShape(10.0, 10.0, 3)
    hardware = Hardware(flops=60 * 80.0, mfu=1.0)
    found = balance(
        [Weight("lm_head.weight", (10, 8)), Weight("model.embed_tokens.weight", (10, 8))],
        SHAPE,
        gpus=2,
        fleet=fleet,
        engine=engine,
        batch_tokens=100.0,
        sent=Publish(0, (1,), fill=2.0, pause=3.0),
        hardware=hardware,
    )
    assert found.trainers == pytest.approx(100 / (100 / 20 + 5.0))
    assert found.engines == pytest.approx(100 / (100 / (2 * 3 / 40) + 3.0))
    assert found.rate == found.engines
