"""cluster.placement=shared: engines sit on the trainers' GPUs, start with their part of the memory, and every setting
that cannot work is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.machines import check_devices
from asyncrl.launch.placement import Placement, imagined, place
from asyncrl.launch.plan import plan
from asyncrl.launch.restarts import RestartPolicy
from asyncrl.network.addresses import READY, TRAINING
from asyncrl.weights.choice import choose
from asyncrl.weights.transports import build_transport
from tests.fakes import ALONE, JOB, addresses, tiny_config
from tests.launch.checks.worlds import ENGINE, ROUTER

SHARED = {"cluster.placement": "shared"}


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("weights.transport", "distributed", "NCCL refuses two ranks on one GPU .*: set auto, tensor or disk"),
        ("engine.urls", ["http://127.0.0.1:1"], "remove them"),
        ("engine.device", "cpu", r"trainer.device \(auto\)"),
        ("engine.memory_fraction", 0.9, "what is left of 0.9: set less"),
        ("engine.server_args", {"mem_fraction_static": 0.3}, "Set engine.memory_fraction instead"),
    ],
)
def test_what_cannot_share_gpus_is_refused_by_name(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        tiny_config(**SHARED, **{field: value})
    with pytest.raises(ConfigError, match="mode=alone has no GPUs to share"):
        tiny_config(**SHARED, **ALONE)


def test_engines_that_share_gpus_and_memory_need_no_turns() -> None:
    """Staleness of 2 versions, pauses in place, parts and overlapped publishes are allowed."""
    settings = {"rollout.max_staleness": 2, "weights.pause_mode": "in_place", "weights.verify": False}
    tiny_config(**SHARED, **settings, **{"trainer.batch_parts": 2})
    tiny_config(**SHARED, **settings, **{"weights.overlap": True})
    tiny_config(**SHARED, **settings, **{"trainer.lora.rank": 4, "weights.lora": "versions"})


@pytest.mark.parametrize(("given", "engine", "trainer"), [(None, 0.4, 0.5), (0.3, 0.3, 0.6)])
def test_trainers_sharing_gpus_get_what_engines_leave(given: float | None, engine: float, trainer: float) -> None:
    config = tiny_config(**SHARED, **{"engine.memory_fraction": given})
    assert config.engine_fraction == engine
    assert config.trainer_fraction == pytest.approx(trainer)
    alone = tiny_config(**{"engine.memory_fraction": given})
    assert (alone.engine_fraction, alone.trainer_fraction) == (given, None)


def placed(config: Config, nodes: int, gpus: int) -> Placement:
    return place(config, imagined(config, nodes, gpus))


SHAPE = {"trainer.data_parallel": 4, "trainer.tensor_parallel": 2, "engine.count": 4, "engine.tensor_parallel": 2}


def test_engines_use_all_gpus_of_the_trainers_and_no_others() -> None:
    found = placed(tiny_config(**SHARED, **SHAPE, **JOB), 3, 4)
    on = [(seats[0].node.name, seats[0].gpus) for seats in found.engines]
    assert on == [("node0", (0, 1)), ("node0", (2, 3)), ("node1", (0, 1)), ("node1", (2, 3))]
    assert {(seat.node.name, seat.gpus) for seat in found.trainers} == {
        ("node0", (0, 1, 2, 3)),
        ("node1", (0, 1, 2, 3)),
    }
    ports = [seat.port for seat in (found.router, found.rollout, found.trainers[0]) if seat.node.name == "node0"]
    ports += [seats[0].port for seats in found.engines if seats[0].node.name == "node0"]
    assert len(set(ports)) == len(ports)


def test_engines_that_do_not_use_the_trainers_gpus_are_refused() -> None:
    placed(tiny_config(**SHARED, **SHAPE | {"engine.count": 3}), 1, 0)  # on CPU any number may share the cores
    with pytest.raises(ConfigError, match=r"With cluster\.placement=shared the engines use the 8 GPUs of the trainers"):
        placed(tiny_config(**SHARED, **SHAPE | {"engine.count": 5}), 1, 16)


def test_shared_gpus_are_counted_once() -> None:
    check_devices(tiny_config(**SHARED, **SHAPE), gpus=8)
    with pytest.raises(ConfigError, match="trainer × engine ranks: got 8") as refused:
        check_devices(tiny_config(**SHARED, **SHAPE), gpus=7)
    assert "set cluster.placement" not in refused.value.remedy


def test_one_gpu_machine_is_told_how_both_use_it() -> None:
    with pytest.raises(ConfigError, match=r"set cluster\.placement=shared, or another"):
        check_devices(tiny_config(), gpus=1)


@pytest.mark.parametrize("gpus", [0, 2])
def test_engines_beside_trainers_start_with_their_part(gpus: int) -> None:
    config = tiny_config(**SHARED, **{"trainer.data_parallel": 2, "engine.count": 2, "engine.memory_fraction": 0.3})
    specs = {spec.name: spec for spec in plan(config, addresses(2, gpus), placed(config, 1, gpus), Path("/runs/r"))}
    engine = specs["engine-1"]
    assert ("--mem-fraction-static" in engine.argv) == (gpus > 0)
    assert not gpus or engine.argv[engine.argv.index("--mem-fraction-static") + 1] == "0.3"
    assert not gpus or engine.argv[engine.argv.index("--base-gpu-id") + 1] == "1"
    assert (
        engine.env["CUDA_VISIBLE_DEVICES"] == specs["trainer-1"].env["CUDA_VISIBLE_DEVICES"] == ("0,1" if gpus else "")
    )
    assert "--enable-memory-saver" not in engine.argv
    assert "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION" not in engine.env
    assert not engine.shares  # it is restarted at any time


def test_weights_stay_on_the_device() -> None:
    assert choose("auto", ["http://127.0.0.1:1"], "127.0.0.1", gpu=True, shared=True)[0] == "tensor"
    with pytest.raises(ConfigError, match="set disk"):
        choose("auto", ["http://10.0.0.2:1"], "10.0.0.1", gpu=True, shared=True)


@pytest.mark.parametrize(("changes", "way"), [(SHARED, "tensor"), ({}, "distributed")])
def test_trainers_choose_cuda_ipc_where_both_use_a_gpu(changes: dict[str, Any], way: str) -> None:
    """NCCL, which is the choice for GPUs of their own, refuses two ranks on one GPU."""
    config: Any = tiny_config(**changes, **{"trainer.dtype": "bfloat16"})
    fleet: Any = SimpleNamespace(urls=["http://127.0.0.1:1"])
    where: dict[str, Any] = {"host": "127.0.0.1", "alone": True, "stage": 0, "gpu": True, "folder": Path("/w")}
    assert build_transport(config, fleet, **where)[1].startswith(way)


def test_engine_is_not_restarted_on_a_gpu_that_the_trainers_use(tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    (tmp_path / TRAINING).touch()
    policy, shares = RestartPolicy(tmp_path), replace(ENGINE, shares=True)
    assert not policy.may_start_now(shares, "killed")
    assert policy.may_start_now(ROUTER, "killed")
    assert policy.count("engine-0") == 0
    assert policy.may_start_now(replace(ENGINE, name="engine-1"), "killed")  # it has a GPU of its own
    (tmp_path / TRAINING).unlink()
    assert policy.may_start_now(shares, "killed")
