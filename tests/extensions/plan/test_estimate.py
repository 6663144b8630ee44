"""The estimate of a run follows the work, the rates and the cores, and names no number that a user cannot check."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.extensions.plan.estimate import (
    ENGINE,
    PASS,
    PUBLISH,
    SIGNAL,
    START_UP,
    TRAINER,
    MachineRates,
    ModelSize,
    StepWorkload,
    estimate,
)
from asyncrl.extensions.plan.shapes import Shape
from asyncrl.extensions.plan.tensors import Weight

MODEL = ModelSize(body=1e8, head=3e7, layers=0)
WORK = StepWorkload(8, 8, 170, 28, 7, steps=40, share_prompts=True, synchronous=False, questions=100)
MACHINE = MachineRates(train=8e10, generate=7e10, trainers=1, engines=1, cores=2, two=2.0)


def test_worked_example() -> None:
    """One group of one sample that everybody reads: the operations by hand."""
    work = StepWorkload(1, 2, 0, 10, 5, steps=3, share_prompts=False, synchronous=True, questions=0)
    found = estimate(ModelSize(1000, 100, 3), work, MachineRates(1.0, 1.0, 1, 1, 1, 1.0))
    packed, written = 2 * 15, 2 * 5
    assert found.trainer == pytest.approx(TRAINER * 6 * SIGNAL * (1000 * packed + 100 * written))
    assert found.engines == pytest.approx(ENGINE * 2 * (1000 * (10 + 2 + written) + 100 * (written + 2)) + PASS * 3 * 7)
    assert found.step == pytest.approx(PUBLISH + found.trainer + found.engines)
    assert found.run == pytest.approx(START_UP + 3 * found.step)


def test_cores_that_share_one_unit_gain_nothing_by_asynchrony() -> None:
    free, shared = (estimate(MODEL, WORK, replace(MACHINE, two=two)) for two in (2.0, 1.0))
    assert free.step == pytest.approx(PUBLISH + max(free.trainer, free.engines))
    assert shared.step == pytest.approx(PUBLISH + shared.trainer + shared.engines)
    assert estimate(MODEL, replace(WORK, synchronous=True), MACHINE).step == pytest.approx(shared.step)


def test_ranks_beyond_the_cores_gain_nothing() -> None:
    two, eight = (estimate(MODEL, WORK, replace(MACHINE, trainers=ranks)) for ranks in (2, 8))
    assert two.trainer == pytest.approx(eight.trainer)
    many = estimate(MODEL, WORK, replace(MACHINE, trainers=8, cores=16))
    assert many.trainer == pytest.approx(two.trainer / 4)


@given(
    st.integers(1, 64),
    st.integers(1, 16),
    st.floats(0, 1000),
    st.floats(1, 1000),
    st.floats(1, 1000),
    st.sampled_from([1.0, 1.5, 2.0]),
)
def test_estimate_grows_with_work_and_falls_with_speed(
    groups: int, size: int, beginning: float, question: float, answer: float, two: float
) -> None:
    work = StepWorkload(groups, size, beginning, question, answer, 10, True, False, 10)
    machine = replace(MACHINE, two=two)
    found = estimate(MODEL, work, machine)
    assert 0 < max(found.trainer, found.engines) <= found.step - PUBLISH + 1e-6 <= found.trainer + found.engines + 2e-6
    assert estimate(MODEL, replace(work, answer=2 * answer), machine).step > found.step
    assert estimate(MODEL, replace(work, share_prompts=False), machine).trainer >= found.trainer - 1e-9
    faster = estimate(MODEL, work, replace(machine, train=2 * machine.train, generate=2 * machine.generate))
    assert faster.step - PUBLISH == pytest.approx((found.step - PUBLISH) / 2)


def test_parameters_are_those_that_multiply_a_token() -> None:
    shape = Shape(1, 4, 4, 4, 4, 8, vocab=10, tied=True)
    weights = [Weight("model.embed_tokens.weight", (10, 4)), Weight("model.layers.0.mlp.up_proj.weight", (8, 4))]
    assert ModelSize.of(weights, shape) == ModelSize(body=32, head=40, layers=1)
    untied = [*weights, Weight("lm_head.weight", (10, 4))]
    assert ModelSize.of(untied, replace(shape, tied=False)) == ModelSize(body=32, head=40, layers=1)
