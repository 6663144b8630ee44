"""The registry says who has joined, who is asked to leave, and who may be stopped."""

from __future__ import annotations

from pathlib import Path

from asyncrl.engine.registry import Registry

ONE, OTHER = "http://10.0.0.1:30000", "http://10.0.0.2:30000"


def test_engines_are_known_by_url_and_the_run_is_none_of_them(tmp_path: Path) -> None:
    writer, reader = Registry(tmp_path), Registry(tmp_path)
    writer.clear()
    assert reader.run() is None
    leases = [writer.lease_of_run(run_id="r"), writer.lease_of(ONE, host="node1")]
    for lease in leases:
        lease.renew()
    run = reader.run()
    assert run
    assert run["run_id"] == "r"
    assert {url: told["host"] for url, told in reader.joined().items()} == {ONE: "node1"}
    leases[0].end()
    assert reader.run() is None


def test_engine_leaves_by_being_asked_let_go_and_stopped(tmp_path: Path) -> None:
    owner, trainer = Registry(tmp_path), Registry(tmp_path)
    owner.clear()
    assert trainer.leaving() == set()
    owner.ask_to_leave(ONE)
    assert trainer.leaving() == {ONE}
    assert not owner.has_left(ONE)
    trainer.let_go(ONE)
    assert owner.has_left(ONE)
    assert not owner.has_left(OTHER)
    owner.stopped(ONE)
    assert trainer.leaving() == set()
    assert owner.has_left(ONE)
    owner.starts(ONE)
    assert not owner.has_left(ONE)


def test_new_life_of_a_run_knows_nobody_of_the_last(tmp_path: Path) -> None:
    before = Registry(tmp_path)
    before.clear()
    before.lease_of(ONE).renew()
    before.ask_to_leave(OTHER)
    Registry(tmp_path).clear()
    assert (Registry(tmp_path).joined(), Registry(tmp_path).leaving()) == ({}, set())


def test_run_without_the_folder_has_nobody(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "none")
    assert (registry.joined(), registry.leaving(), registry.has_left(ONE)) == ({}, set(), False)
