"""cluster.lend: engines on the trainers' GPUs, beside those that always serve, and what does not fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_devices
from asyncrl.launch.placement import Placement, imagined, place
from asyncrl.launch.plan import plan
from asyncrl.network.addresses import LEND
from tests.fakes import addresses, tiny_config
from tests.launch.test_elastic import Decided

LENDING = {"cluster.lend": True, "cluster.elastic": "act", "rollout.max_running_groups": "auto"}
SHAPE = {"trainer.data_parallel": 4, "trainer.tensor_parallel": 2, "engine.count": 2, "engine.tensor_parallel": 2}


def lending(**changes: Any) -> Config:
    return tiny_config(**{**LENDING, **changes})


def placed(config: Config, nodes: int, gpus: int) -> Placement:
    return place(config, imagined(config, nodes, gpus))


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("cluster.elastic", "off", "set act"),
        ("cluster.elastic", "advise", "set act"),
        ("weights.pause_mode", "drain", "set in_place, retract or abort"),
        ("weights.verify", False, "set true"),
        ("engine.device", "cpu", r"trainer.device \(auto\)"),
        ("rollout.max_running_groups", None, "set auto, or a number"),
        ("trainer.batch_parts", 2, "set 1"),
        ("weights.overlap", True, "set false"),
        ("trainer.optimizer.offload", True, "set false"),
        ("engine.server_args", {"enable-memory-saver": False}, "remove it"),
    ],
)
def test_what_cannot_be_lent_is_refused_by_name(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"{remedy}.*, or set cluster.lend=false") as refused:
        lending(**{field: value})
    assert refused.value.field.startswith(field)
    tiny_config(**{**LENDING, "cluster.lend": False, field: value})


def test_engines_of_a_loan_fill_the_trainers_gpus_and_no_others_and_have_ports_of_their_own() -> None:
    config = lending(**SHAPE, **{"cluster.launcher": "slurm"})
    found = placed(config, 3, 4)
    on = [(seats[0].node.name, seats[0].gpus) for seats in found.lent]
    assert on == [("node0", (0, 1)), ("node0", (2, 3)), ("node1", (0, 1)), ("node1", (2, 3))]
    assert {seats[0].node.name for seats in found.engines} == {"node2"}
    ports = [(seat.node.name, seat.port) for seat in (found.router, found.rollout, found.trainers[0])]
    ports += [(seats[0].node.name, seats[0].port) for seats in (*found.engines, *found.lent)]
    assert len(set(ports)) == len(ports)
    assert set(found.urls()["lent"]) <= set(found.listening())


def test_without_gpus_each_machine_of_trainers_lends_to_one_engine() -> None:
    assert len(placed(lending(), 1, 0).lent) == 1
    assert placed(tiny_config(), 1, 0).lent == []


def test_an_engine_that_fits_no_trainers_gpus_is_refused() -> None:
    wide = {"engine.tensor_parallel": 2, "engine.device": "cuda", "trainer.device": "cuda"}
    with pytest.raises(ConfigError, match=r"An engine takes 2 GPUs, and the trainers have 1 on a machine"):
        placed(lending(**wide), 1, 4)


def test_lent_gpus_are_counted_once() -> None:
    check_devices(lending(**SHAPE), gpus=12)


@pytest.mark.parametrize("gpus", [0, 2])
def test_engines_of_a_loan_can_release_their_memory_and_see_the_gpus_that_ipc_handles_name(gpus: int) -> None:
    config = lending()
    specs = {spec.name: spec for spec in plan(config, addresses(1, gpus), placed(config, 1, gpus), Path("/runs/r"))}
    lent, always = specs["engine-lent-0"], specs["engine-0"]
    assert (lent.shares, always.shares) == (lent.lent, always.lent) == (True, False)
    assert ("--enable-memory-saver" in lent.argv, "--enable-memory-saver" in always.argv) == (gpus > 0, False)
    assert lent.env["CUDA_VISIBLE_DEVICES"] == ("0,1" if gpus else "")
    assert not gpus or lent.argv[lent.argv.index("--base-gpu-id") + 1] == "0"
    assert not gpus or always.env["CUDA_VISIBLE_DEVICES"] == "1"
    seeds = [spec.argv[spec.argv.index("--random-seed") + 1] for spec in (lent, always)]
    assert seeds[0] != seeds[1]


def test_the_decision_to_lend_is_a_file_that_the_trainers_read(tmp_path: Path) -> None:
    made = Decided(tmp_path, **LENDING)
    assert made.decide("lend_trainer", 1, 1.5) == "allowed the trainers to lend their GPUs to 1 engines"
    assert (tmp_path / LEND).exists()


def test_where_nothing_can_be_lent_the_decision_says_how(tmp_path: Path) -> None:
    assert Decided(tmp_path).decide("lend_trainer", 1, 1.5) == "advice only: set cluster.lend=true"
    assert not (tmp_path / LEND).exists()
