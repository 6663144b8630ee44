"""asyncrl-engines: what is wrong is refused with field, value and remedy (and tests/integration/test_elastic.py)."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.registry import Registry
from asyncrl.errors import ConfigError
from asyncrl.extensions.join.command import EngineKeeper, RunEnded, _Run, check_reach, main, surrounding
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Node
from asyncrl.launch.processes import Stopped
from asyncrl.leases import RENEW_SECONDS
from tests.fakes import ALONE, JOB, Machines, addresses, tiny_config

HERE = socket.gethostname()


def under_way(folder: Path, *, host: str = HERE, here: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A run's folder, as its launcher keeps it."""
    folder.mkdir()
    (folder / "config.json").write_text(tiny_config(**changes).model_dump_json())
    replace(addresses(trainers=("127.0.0.1",)), **(here or {})).write(folder)
    Registry(folder).clear()
    Registry(folder).lease_of_run(run_id="run0", host=host, job="").renew()
    return folder


def test_folder_without_a_run_that_is_under_way_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == 2
    assert "RUN: got" in capsys.readouterr().err
    run_dir = under_way(tmp_path / "run")
    (run_dir / "leases" / "run.lease").unlink()
    assert main(["add", str(run_dir)]) == 2
    assert "No run is active in this folder" in capsys.readouterr().err
    Registry(run_dir).lease_of_run(run_id="another life, with another key", host=HERE).renew()
    assert main(["add", str(run_dir)]) == 2


def test_run_that_trains_nothing_gives_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = under_way(tmp_path / "run", **ALONE)
    assert main(["add", str(run_dir)]) == 2
    assert "mode: got 'alone'" in capsys.readouterr().err


def test_engine_that_the_run_does_not_have_cannot_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = under_way(tmp_path / "run")
    assert main(["remove", str(run_dir), "http://elsewhere:1"]) == 2
    assert (
        "URL: got 'http://elsewhere:1'. The engines of the run are ['http://127.0.0.1:20000']"
        in capsys.readouterr().err
    )
    assert Registry(run_dir).leaving() == set()


def test_engines_are_listed_with_owner_and_activity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = under_way(tmp_path / "run", here={"attached": ("http://127.0.0.1:9",)})
    registry = Registry(run_dir)
    registry.lease_of("http://127.0.0.1:1", host="node7").renew()
    registry.ask_to_leave("http://127.0.0.1:1")
    assert main(["list", str(run_dir)]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    told = {url: " ".join(rest.split()) for url, rest in lines}
    assert told == {
        "http://127.0.0.1:20000": "of the run does not answer",
        "http://127.0.0.1:9": "engine.urls does not answer",
        "http://127.0.0.1:1": "joined from node7 leaves",
    }


@pytest.mark.parametrize(
    ("run", "address", "field"),
    [
        ({"host": "another machine"}, "10.0.0.7", "cluster.host"),  # its servers listen on loopback alone
        ({"here": {"trainers": ("10.0.0.1",), "router": "http://10.0.0.1:1"}}, "127.0.0.1", "--host"),
        (
            {"here": {"trainers": ("10.0.0.1",), "router": "http://10.0.0.1:1", "engines": ("http://10.0.0.1:2",)}},
            "10.0.0.2",
            "weights.transport",  # auto took shared memory
        ),
    ],
)
def test_machine_that_cannot_be_reached_is_refused(
    tmp_path: Path, run: dict[str, Any], address: str, field: str
) -> None:
    found = _Run(under_way(tmp_path / "run", **run))
    with pytest.raises(ConfigError) as caught:
        check_reach(found, Node("", address, (), ()))
    assert caught.value.field == field


def test_no_engine_joins_those_that_use_the_trainers_gpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="share the GPUs of its trainers: no others can join") as caught:
        _Run(under_way(tmp_path / "run", **{"cluster.placement": "shared"}))
    assert caught.value.value == "shared"


def test_machine_that_they_reach_passes(tmp_path: Path) -> None:
    check_reach(_Run(under_way(tmp_path / "one")), Node("", "127.0.0.1", (), ()))
    far = {"trainers": ("10.0.0.1", "10.0.0.2"), "router": "http://10.0.0.1:1", "engines": ("http://10.0.0.3:2",)}
    check_reach(_Run(under_way(tmp_path / "other", here=far)), Node("", "10.0.0.4", (), ()))


def test_first_signal_asks_to_let_go_and_the_second_stops(tmp_path: Path) -> None:
    run = _Run(under_way(tmp_path / "run"))
    keeper = EngineKeeper(run, {"http://127.0.0.1:1": "node7"})
    keeper.each_poll()
    assert run.registry.joined().keys() == {"http://127.0.0.1:1"}
    keeper.asked_to_stop(15)
    assert run.registry.leaving() == {"http://127.0.0.1:1"}
    with pytest.raises(Stopped):
        keeper.asked_to_stop(15)
    keeper.end()
    assert run.registry.joined() == {}
    assert run.registry.leaving() == set()


def test_keeper_ends_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("asyncrl.extensions.join.command.time.monotonic", lambda: now[0])
    run_dir = under_way(tmp_path / "run")
    keeper = EngineKeeper(_Run(run_dir), {})
    now[0] += 2 * RENEW_SECONDS
    keeper.each_poll()
    (run_dir / "leases" / "run.lease").unlink()
    keeper.each_poll()  # not at every poll
    now[0] += 2 * RENEW_SECONDS
    with pytest.raises(RunEnded):
        keeper.each_poll()


def test_numbers_of_engines_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["add", str(under_way(tmp_path / "run")), "--count", "0"]) == 2
    assert "--count: got 0" in capsys.readouterr().err


def test_engines_join_on_machines_of_the_processs_job(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tiny_config(extensions=JOB["extensions"])
    assert type(surrounding(alone)) is Cluster
    monkeypatch.setattr(Machines, "surrounds", lambda: True)
    assert type(surrounding(alone)) is Machines
