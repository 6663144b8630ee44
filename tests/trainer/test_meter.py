"""A step's time is divided by purpose without counting any of it twice, and its operations are those of its passes."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.algo.pack import pack
from asyncrl.algo.samples import Sample
from asyncrl.parallel import Parallel
from asyncrl.trainer import meter
from asyncrl.trainer.meter import PEAK, PURPOSES, StepMeter, peak_rate
from asyncrl.trainer.operations import operations_of
from tests.fakes import Clock

ALONE: Any = dict.fromkeys(("rank", "tp_rank", "pp_rank", "cp_rank", "dp_rank", "etp_rank", "ep_rank", "edp_rank"), 0)
ALONE |= dict.fromkeys(("tp", "pp", "cp", "dp", "etp", "ep"), 1)
ALONE |= {"device": torch.device("cpu"), "tp_group": None, "expert_group": None}
MEGATRON = Path(str(find_spec("megatron.core").origin)).parent  # type: ignore[union-attr]
OUTER = {"forward-backward"}
INNER = "optimizer-"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)


def test_a_span_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meter, "time", SimpleNamespace(time=clock, perf_counter=clock))
    one = StepMeter(Parallel(**ALONE))
    one.begin()
    with one.span("optimizer"):
        clock.now += 0.02
        timer = one("params-all-gather", log_level=1)
        timer.start(barrier=False)
        clock.now += 0.05
        timer.stop()
    found = one.figures(100.0, seconds=0.07)
    assert (found["time/optimizer"], found["time/communication"]) == pytest.approx((0.02, 0.05))
    assert found["time/forward"] == found["time/backward"] == 0.0
    assert found["tokens_per_s/rank"] == pytest.approx(100 / 0.07)
    assert found["memory/peak"] > 1e7
    assert "flops/utilization" not in found


def test_every_timer_of_megatron_has_a_purpose() -> None:
    files = [
        file for part in ("pipeline_parallel", "distributed", "optimizer") for file in (MEGATRON / part).glob("*.py")
    ]
    names = {name for file in files for name in re.findall(r"timers\(\s*'([a-z-]+)'", file.read_text())}
    assert {"forward-compute", "backward-compute", "all-grads-sync", "params-all-gather"} <= names
    without = {name for name in names if meter._purpose(name) is None}
    assert without - OUTER == {name for name in names if name.startswith(INNER)}
    assert {meter._purpose(name) for name in names - without} < set(PURPOSES)


def test_operations_are_counted_per_token_pair_and_output() -> None:
    hf = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3}
    hf |= {"num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": 50}
    weights = 3 * (2 * 8 * 4 * (2 + 1) + 3 * 8 * 16)
    shared = [Sample([1, 2, 3], [4, 5], [True, True], 0, 0), Sample([1, 2, 3], [6, 7], [True, True], 1, 2)]
    packed = pack([shared])
    pairs = 1 + 2 + 3 + 4 + 4  # three of the prompt; each answer's first token runs and attends to four
    assert packed.num_tokens == 5
    expected = 6 * weights * 5 + 7 * (2 * 4) * 2 * 3 * pairs + 6 * 8 * 50 * 4
    assert float(operations_of(hf).of(packed)) == expected
    assert float(operations_of(hf).of(packed, gradient=False)) == expected / 3
    frozen = expected - 2 * weights * 5 - 2 * 8 * 50 * 4  # no gradients of weights
    assert float(operations_of(hf).of(packed, frozen=True)) == pytest.approx(frozen)
    windowed = {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 2}
    windowed |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    near = 1 + 2 * 4  # of the pairs, those that are in a window of two
    fewer = expected - 7 * (2 * 4) * 2 * 2 * (pairs - near)
    assert float(operations_of(hf | windowed).of(packed)) == fewer


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("GeForce", 0),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_name(name: str, rate: float) -> None:
    assert (peak_rate(name) or 0) == rate
    assert all(rate > 1e14 for rate in PEAK.values())
