"""The machines of a run: this one, or those of the cluster that the settings name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.cluster import Cluster, cluster_of
from asyncrl.launch.placement import ports_wanted
from asyncrl.launch.run_folder import prepare
from asyncrl.network.addresses import NODE, node_name
from tests.fakes import JOB, Machines, tiny_config


def test_this_machine_is_probed_when_it_is_needed() -> None:
    config = tiny_config(**{"cluster.gpus": 2})
    cluster = cluster_of(config)
    assert type(cluster) is Cluster
    assert (cluster.here, list(cluster.nodes), list(cluster.machines)) == (True, [], [])
    cluster.probe(config)
    ((node,), (machine,)) = cluster.nodes, cluster.machines
    assert (node.name, node.address, node.gpus, len(node.ports)) == ("", "127.0.0.1", ("0", "1"), ports_wanted(config))
    assert {"python", "asyncrl", "torch", "sglang"} <= machine.versions.keys()
    cluster.probe(config, 7)
    assert len(cluster.nodes[0].ports) == 7


def test_a_program_is_run_here_and_ended_in_time() -> None:
    cluster = Cluster(tiny_config())
    assert cluster.everywhere([sys.executable, "-S", "-c", "print(3)"], 30.0) == ["3\n"]
    assert cluster.everywhere([sys.executable, "-S", "-c", "import time; time.sleep(60)"], 0.2) == [""]


def test_a_cluster_is_named_by_the_settings() -> None:
    assert type(cluster_of(tiny_config(**JOB))) is Machines
    assert type(cluster_of(tiny_config(extensions=JOB["extensions"]))) is Cluster


def test_a_program_knows_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE, "node7")
    assert node_name() == "node7"


def test_kept_job_state_makes_no_folder_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    prepare(tiny_config(**JOB), tmp_path)
    with pytest.raises(ConfigError, match="not empty"):
        prepare(tiny_config(), tmp_path)
