"""The processes are spread over the machines, started like the rollout process, and restarted alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl import lookup
from asyncrl.launch.placement import imagined, place, ports_wanted
from asyncrl.launch.plan import ProcessSpec, plan
from tests.fakes import addresses, tiny_config

RUN_DIR = Path("/runs/r")


def planned(count: int, nodes: int = 1, gpus: int = 0, **changes: object) -> tuple[dict[str, ProcessSpec], str]:
    """Return the processes of a run, and where those that play meet the rollout process."""
    config = tiny_config(**{"processes.count": count, **changes})
    placement = place(config, imagined(config, nodes, gpus))
    shared = lookup.shared(config, placement)
    run = replace(addresses(gpus=gpus), **placement.urls(), extensions=shared)
    url = shared.get("processes", {}).get("url", "")
    seats = (
        placement.rollout,
        placement.router,
        *placement.trainers,
        *(one for two in placement.engines for one in two),
    )
    assert url not in {seat.url for seat in seats}
    return {spec.name: spec for spec in plan(config, run, placement, RUN_DIR)}, url


def test_players_are_like_rollouts_but_may_restart() -> None:
    specs, url = planned(2, **{"cluster.on_engine_death": "fail", "cluster.max_restarts": 3})
    players = [specs[f"episodes-{number}"] for number in range(2)]
    assert [spec.argv[-2:] for spec in players] == [[str(RUN_DIR), "0"], [str(RUN_DIR), "1"]]
    assert all(spec.env == specs["rollout"].env and spec.reports and spec.restarts == 3 for spec in players)
    assert not specs["rollout"].restarts
    assert url
    assert ports_wanted(tiny_config(**{"processes.count": 2})) == ports_wanted(tiny_config()) + 1


def test_players_spread_over_rollout_and_engine_machines() -> None:
    pytest.importorskip("asyncrl.extensions.slurm")
    slurm = {"cluster.launcher": "slurm", "cluster.nodes": 4, "cluster.gpus": 4, "cluster.host": None}
    shape = {"trainer.data_parallel": 4, "engine.count": 8, "cluster.cpu_nodes": 1}
    specs, url = planned(5, 4, 4, **slurm, **shape)
    nodes = [specs[f"episodes-{number}"].node for number in range(5)]
    assert nodes == ["node0", "node2", "node3", "node0", "node2"]
    assert "node0" in url


def test_one_process_is_none() -> None:
    specs, url = planned(1)
    assert not [name for name in specs if name.startswith("episodes")]
    assert url == ""
