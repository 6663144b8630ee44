"""Leases on a file system that may be slow: nobody is given up for what a reader could not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.leases import LEASE_SECONDS, RENEW_SECONDS, Lease, Leases
from tests.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(tmp_path: Path, clock: Clock) -> Lease:
    return Lease(tmp_path / "e0.lease", {"url": "http://e0"}, clock)


@pytest.fixture
def leases(tmp_path: Path, clock: Clock) -> Leases:
    return Leases(tmp_path, clock)


def looks(leases: Leases, clock: Clock, seconds: float, every: float = RENEW_SECONDS) -> None:
    """Again and again, for so long."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += every
        leases.look()


def test_lease_holds_while_it_is_renewed_and_ends_when_it_is_not(lease: Lease, leases: Leases, clock: Clock) -> None:
    for _ in range(40):
        lease.renew()
        assert leases.look()["e0"]["url"] == "http://e0"
        clock.now += RENEW_SECONDS
    looks(leases, clock, LEASE_SECONDS - 2 * RENEW_SECONDS)
    assert leases.look().keys() == {"e0"}
    looks(leases, clock, 3 * RENEW_SECONDS)
    assert leases.look() == {}
    lease.renew()  # it was held up
    assert leases.look().keys() == {"e0"}


def test_lease_that_is_ended_is_gone_at_once(lease: Lease, leases: Leases) -> None:
    lease.renew()
    assert leases.look().keys() == {"e0"}
    lease.end()
    lease.end()
    assert leases.look() == {}


def test_file_is_written_when_it_is_time_and_not_at_every_call(lease: Lease, tmp_path: Path, clock: Clock) -> None:
    lease.renew()
    first = (tmp_path / "e0.lease").read_text()
    clock.now += RENEW_SECONDS / 2
    lease.renew()
    assert (tmp_path / "e0.lease").read_text() == first
    clock.now += RENEW_SECONDS / 2
    lease.renew()
    assert (tmp_path / "e0.lease").read_text() != first


def test_time_in_which_a_reader_did_not_look_counts_little(lease: Lease, leases: Leases, clock: Clock) -> None:
    """A trainer in a long step, or held up by the file system, as the writer may have been."""
    lease.renew()
    leases.look()
    clock.now += 100 * LEASE_SECONDS
    assert leases.look().keys() == {"e0"}


def test_what_cannot_be_read_is_as_it_was(
    lease: Lease, leases: Leases, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease.renew()
    leases.look()
    (tmp_path / "e0.lease").write_text('{"number": 2, "ur')  # in the middle of a change
    looks(leases, clock, 2 * LEASE_SECONDS)
    assert leases.look().keys() == {"e0"}

    def stale(_: object) -> list[str]:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("os.listdir", stale)
    looks(leases, clock, 2 * LEASE_SECONDS)
    assert leases.look().keys() == {"e0"}


def test_folder_that_is_not_there_has_nobody(tmp_path: Path) -> None:
    assert Leases(tmp_path / "none").look() == {}


def test_writer_outlives_a_refusing_file_system(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    lease = Lease(tmp_path / "file" / "e0.lease", {}, clock)
    for _ in range(3):
        lease.renew()
        clock.now += RENEW_SECONDS
    assert capsys.readouterr().err.count("cannot renew") == 1
    (tmp_path / "file").unlink()
    lease.renew()
    assert Leases(tmp_path / "file", clock).look().keys() == {"e0"}
