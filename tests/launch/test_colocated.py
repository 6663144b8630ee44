"""cluster.placement=colocated: engines sit on the trainers' GPUs, start as engines that can release their memory, and
every setting that cannot work is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_devices
from asyncrl.launch.placement import Placement, imagined, place
from asyncrl.launch.plan import plan
from asyncrl.launch.restarts import RestartPolicy
from asyncrl.network.addresses import READY, TRAINING
from asyncrl.weights.choice import choose
from tests.fakes import addresses, tiny_config
from tests.launch.preflight.worlds import ENGINE, ROUTER

COLOCATED = {
    "cluster.placement": "colocated",
    "rollout.max_staleness": 1,
    "weights.pause_mode": "retract",
}


def colocated(**changes: Any) -> Config:
    return tiny_config(**{**COLOCATED, **changes})


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("weights.pause_mode", "in_place", "retract"),
        ("weights.transport", "delta", "auto, tensor or disk"),
        ("weights.transport", "distributed", "auto, tensor or disk"),
        ("weights.verify", False, "set true"),
        ("trainer.optimizer.offload", True, "set false"),
        ("rollout.max_staleness", 2, "set 0"),
        ("engine.urls", ["http://127.0.0.1:1"], "remove them"),
        ("engine.device", "cpu", r"trainer.device \(auto\)"),
        ("engine.server_args", {"enable_memory_saver": False}, "remove it"),
        ("engine.server_args", {"weight_cache_mode": "host"}, "remove it"),
    ],
)
def test_what_cannot_take_turns_is_refused_by_name(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        colocated(**{field: value})
    assert refused.value.field.startswith(field)
    separate = {"cluster.placement": "separate"}
    tiny_config(**{field: value}, **separate)


def test_only_training_takes_turns() -> None:
    with pytest.raises(ConfigError, match=r"mode=rollout_only has no turns"):
        colocated(mode="rollout_only", record=True)


def placed(config: Config, nodes: int, gpus: int) -> Placement:
    return place(config, imagined(config, nodes, gpus))


SHAPE = {"trainer.data_parallel": 4, "trainer.tensor_parallel": 2, "engine.count": 4, "engine.tensor_parallel": 2}


def test_engines_use_all_gpus_of_the_trainers_and_no_others() -> None:
    found = placed(colocated(**SHAPE, **{"cluster.launcher": "slurm"}), 3, 4)
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
    with pytest.raises(ConfigError, match="the engines use the 8 GPUs of the trainers"):
        placed(colocated(**SHAPE | {"engine.count": 3}), 1, 8)
    placed(colocated(**SHAPE | {"engine.count": 3}), 1, 0)  # on CPU any number may share the cores


def test_shared_gpus_are_counted_once() -> None:
    check_devices(colocated(**SHAPE), gpus=8)
    with pytest.raises(ConfigError, match="trainer × engine ranks: got 8"):
        check_devices(colocated(**SHAPE), gpus=7)


@pytest.mark.parametrize("gpus", [0, 2])
def test_engines_start_with_a_memory_saver_on_gpus_and_see_those_that_ipc_handles_name(gpus: int) -> None:
    config = colocated(**{"trainer.data_parallel": 2, "engine.count": 2})
    placement = placed(config, 1, gpus)
    specs = {spec.name: spec for spec in plan(config, addresses(2, gpus), placement, Path("/runs/r"))}
    engine = specs["engine-1"]
    assert ("--enable-memory-saver" in engine.argv) == (gpus > 0)
    assert engine.env["CUDA_VISIBLE_DEVICES"] == ("0,1" if gpus else "")
    assert not gpus or engine.argv[engine.argv.index("--base-gpu-id") + 1] == "1"
    assert engine.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert specs["trainer-1"].env["CUDA_VISIBLE_DEVICES"] == ("0,1" if gpus else "")


def test_weights_stay_on_the_device() -> None:
    assert choose("auto", ["http://127.0.0.1:1"], "127.0.0.1", gpu=True, colocated=True)[0] == "tensor"
    with pytest.raises(ConfigError, match="set disk"):
        choose("auto", ["http://10.0.0.2:1"], "10.0.0.1", gpu=True, colocated=True)


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
