"""A delta is exactly what changed: applied to the version that it builds upon it gives the new bits, else nothing."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.errors import ConfigError
from asyncrl.extensions.delta.extension import Delta
from asyncrl.extensions.delta.loader import DeltaMismatch, KeepWhereNaN, apply, load
from asyncrl.extensions.delta.transport import DeltaTransport, changed
from asyncrl.network.addresses import Access
from asyncrl.user_code import load as imported
from asyncrl.weights.bucket import fill, nbytes, plan_buckets
from asyncrl.weights.layouts import Pieces
from tests.fakes import tiny_config


class Model:
    """Model as SGLang passes it to a loader, with one fused parameter: gate above up (MergedColumnParallelLinear)."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.plain = tensors["plain"].clone()
        self.fused = torch.cat([tensors["gate"], tensors["up"]])

    def load_weights(self, weights: Any) -> None:
        """Load in another thread, as SGLang's deepseek loader may (model_loader/utils.should_async_load)."""
        for name, tensor in weights:
            half = len(self.fused) // 2
            target = {"plain": self.plain, "gate": self.fused[:half], "up": self.fused[half:]}[name]
            if getattr(tensor, "_sglang_runai_streamer_tensor", False):
                target.copy_(tensor)
            else:
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(target.copy_, tensor).result()

    def holds(self, tensors: dict[str, Tensor]) -> bool:
        fused = torch.cat([tensors["gate"], tensors["up"]])
        pairs = ((self.plain, tensors["plain"]), (self.fused, fused))
        return all(mine.view(torch.uint8).equal(its.contiguous().view(torch.uint8)) for mine, its in pairs)


class Trainer:
    """The transport's half, without engines: writes a version's folder."""

    def __init__(self, root: Path, limit: int = 40) -> None:
        self.fleet = Fleet([], Access(""), 1.0)
        self.transport = DeltaTransport(fleet=self.fleet, folder=root, stage=0, ranks=1)
        self.limit = limit

    def write(self, version: int, tensors: dict[str, Tensor], *, full: bool = False) -> dict[str, Any]:
        self.transport.start(version, full=full)
        stream = ((name, Pieces([tensor])) for name, tensor in tensors.items())
        for bucket in plan_buckets([(n, t.dtype, t.shape) for n, t in tensors.items()], self.limit):
            flat = torch.empty(nbytes(bucket), dtype=torch.uint8)
            fill(flat, bucket, stream)
            self.transport.send(flat, bucket)
        base = None if self.transport._full else self.transport._base_version
        folder = self.transport._commit(version)
        (folder / "receipts").mkdir()
        self.transport.accepted(version)
        return {"folder": str(folder), "version": version, "base": base, "engine": 0}


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"plain": (7, 5), "gate": (4, 6), "up": (4, 6)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def stepped(tensors: dict[str, Tensor], seed: int, share: float) -> dict[str, Tensor]:
    """Some bits changed, in some tensors."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(
            torch.rand(t.shape, generator=draw) < share, torch.randn(t.shape, generator=draw).to(t.dtype), t
        )
        for name, t in tensors.items()
    }


@given(
    steps=st.lists(st.tuples(st.integers(0, 99), st.floats(0, 1)), min_size=1, max_size=4),
    limit=st.sampled_from([1, 40, 10**6]),
)
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_engine_holds_every_version_bit_for_bit(dtype, steps, limit, tmp_path_factory) -> None:
    now = weights(0, dtype)
    trainer, model = Trainer(tmp_path_factory.mktemp("delta"), limit), Model(weights(1, dtype))
    apply(model, trainer.write(1, now))
    assert model.holds(now)
    for version, (seed, share) in enumerate(steps, 2):
        now = stepped(now, seed, share)
        apply(model, trainer.write(version, now))
        assert model.holds(now)


def test_minus_zero_and_the_smallest_difference_arrive(tmp_path: Path) -> None:
    now = {name: torch.zeros_like(tensor) for name, tensor in weights(0).items()}
    trainer, model = Trainer(tmp_path, 10**6), Model(now)
    apply(model, trainer.write(1, now))
    now = {name: tensor.clone() for name, tensor in now.items()}
    now["plain"][0, 0], now["gate"][1, 1] = -0.0, torch.finfo(torch.bfloat16).smallest_normal
    order = trainer.write(2, now)
    assert order["base"] == 1
    apply(model, order)
    assert model.holds(now)


def test_a_small_change_is_a_small_file(tmp_path: Path) -> None:
    trainer, now = Trainer(tmp_path, 10**6), {"plain": torch.randn(1000, 100)}
    trainer.write(1, now)
    trainer.write(2, {"plain": stepped(now, 3, 0.01)["plain"]})
    size = {v: sum(f.stat().st_size for f in (tmp_path / f"v{v:06d}").glob("*.safetensors")) for v in (1, 2)}
    assert size[2] < size[1] / 25


@pytest.mark.parametrize("again", [1, 2])
def test_repeated_or_disordered_delta_is_refused(again: int, tmp_path: Path) -> None:
    trainer, now = Trainer(tmp_path, 10**6), weights(0)
    model = Model(now)
    orders = [trainer.write(1, now)]
    states = [now]
    for version in (2, 3):
        states.append(stepped(states[-1], version, 0.1))
        orders.append(trainer.write(version, states[-1]))
    apply(model, orders[0])
    if again == 1:
        apply(model, orders[1])
        with pytest.raises(DeltaMismatch, match="version 2 is already applied"):
            apply(model, orders[1])
        assert model.holds(states[1])
    else:
        with pytest.raises(DeltaMismatch, match="are relative to version 2, but this engine holds 1"):
            apply(model, orders[2])
        assert model.holds(states[0])


def test_damaged_file_is_refused_before_anything_changes(tmp_path: Path) -> None:
    trainer, now = Trainer(tmp_path, 1), weights(0)
    model = Model(now)
    apply(model, trainer.write(1, now))
    order = trainer.write(2, stepped(now, 5, 0.2))
    file = sorted(Path(order["folder"]).glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DeltaMismatch, match=f"{file.name} is damaged"):
        apply(model, order)
    assert model.holds(now)


def test_a_refusal_is_a_receipt_and_never_an_error_in_the_engine(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("asyncrl.extensions.delta.loader.own_rank", lambda: 0)
    trainer, now = Trainer(tmp_path, 10**6), weights(0)
    model = Model(now)
    for order, refused in (({**trainer.write(1, now), "base": 7}, True), (trainer.write(2, now, full=True), False)):
        load(model, [(json.dumps(order), torch.zeros(1))])
        receipt = json.loads((Path(order["folder"]) / "receipts" / "0-0.json").read_text())
        assert bool(receipt["refused"]) is refused
    assert model.holds(now)


def test_new_nan_and_changed_integers_are_sent_in_full() -> None:
    for tensor, new in ((torch.zeros(3), float("nan")), (torch.zeros(3, dtype=torch.int32), 1)):
        bucket = plan_buckets([("t", tensor.dtype, tensor.shape)], 1000)[0]
        base = tensor.view(torch.uint8).clone()
        tensor[1] = new
        assert changed(tensor.view(torch.uint8), base, bucket) is None


def test_what_must_arrive_together_is_named_together() -> None:
    pair = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")]
    bucket = plan_buckets([(name, torch.float32, torch.Size([4])) for name in pair], 1000)[0]
    base = torch.zeros(48, dtype=torch.uint8)
    flat = base.clone()
    flat[0] = 1
    found = changed(flat, base, bucket)
    assert found is not None
    assert {name.partition("|")[0] for name in found} == set(pair[:2])
    assert len(found[f"{pair[1]}|at"]) == 0


def test_engine_that_joins_makes_the_next_update_full(tmp_path: Path) -> None:
    trainer, now = Trainer(tmp_path, 10**6), weights(0)
    trainer.write(1, now)
    trainer.fleet.joining.append("http://new")
    assert trainer.write(2, now)["base"] is None
    trainer.fleet.joining.clear()
    assert trainer.write(3, now)["base"] == 2


def test_only_copies_keep_where_nan() -> None:
    target, source = torch.tensor([1.0, 2.0]), torch.tensor([float("nan"), 5.0])
    with KeepWhereNaN():
        target.copy_(source)
        assert torch.isnan(source + 1)[0]
    assert target.tolist() == [1.0, 5.0]


COLOCATED = {"cluster.placement": "colocated", "weights.pause_mode": "retract", "rollout.max_staleness": 1}
ADAPTERS = {"trainer.lora.rank": 4, "weights.lora": "versions"}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"weights.overlap": True}, "set another, or set weights.overlap=false"),
        (COLOCATED, "set auto, tensor or disk"),
        (ADAPTERS, "set auto, tensor or disk"),
    ],
)
def test_runs_in_which_a_delta_applies_to_nothing_are_refused(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        tiny_config(**changes, **{"weights.transport": "delta"})
    assert (refused.value.field, refused.value.value) == ("weights.transport", "delta")
    tiny_config(**changes, **{"weights.transport": "disk"})
    tiny_config(**{"cluster.placement": "shared", "weights.transport": "delta"})


def test_offered_names_are_those_of_transport_and_loader() -> None:
    offered = tiny_config(**{"weights.transport": "delta"}).transport
    assert offered is Delta.transports["delta"]
    assert imported(offered.path, "") is DeltaTransport
    module, _, name = str(offered.loader).rpartition(".")
    assert imported(f"{module}:{name}", "") is load
