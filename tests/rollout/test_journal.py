"""Batches are kept for trainers that start again, and no longer than they may be needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.rollout.journal import Journal

WARNINGS: list[str] = []


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    WARNINGS.clear()
    return Journal(tmp_path, WARNINGS.append)


def checkpoint(run_dir: Path, version: int) -> None:
    folder = CheckpointStore(run_dir).path(version)
    folder.mkdir(parents=True)
    (folder / manifest.NAME).touch()


def kept(run_dir: Path) -> list[str]:
    return sorted(file.name for file in (run_dir / "journal").iterdir())


def test_parts_are_read_as_they_were_kept(journal: Journal) -> None:
    journal.keep(3, 0, b"first")
    journal.keep(3, 1, b"second")
    assert [journal.read(3, part) for part in range(3)] == [b"first", b"second", None]


def test_batches_since_the_last_but_one_checkpoint_stay(journal: Journal, tmp_path: Path) -> None:
    for version in range(7):
        journal.keep(version, 0, b"batch")
        if version in (1, 3, 5):
            checkpoint(tmp_path, version + 1)
    assert kept(tmp_path) == ["00000004-0000", "00000005-0000", "00000006-0000"]


def test_where_one_checkpoint_is_kept_only_batches_since_it_stay(journal: Journal, tmp_path: Path) -> None:
    for version in range(4):
        journal.keep(version, 0, b"batch")
        shutil.rmtree(CheckpointStore(tmp_path).folder, ignore_errors=True)  # checkpoint.keep_last=1
        checkpoint(tmp_path, version + 1)
    journal.keep(4, 0, b"batch")
    assert kept(tmp_path) == ["00000004-0000"]


def test_run_that_begins_again_has_no_batches_of_an_earlier_one(journal: Journal, tmp_path: Path) -> None:
    journal.keep(0, 0, b"old")
    assert Journal(tmp_path, WARNINGS.append).read(0, 0) is None


def test_disk_that_takes_nothing_costs_the_journal_and_not_the_run(journal: Journal, tmp_path: Path) -> None:
    journal.keep(0, 0, b"batch")
    (tmp_path / "journal/00000001-0000").mkdir()  # in the way of a file
    journal.keep(1, 0, b"batch")
    (warning,) = WARNINGS
    assert "batches are no longer kept" in warning
    journal.keep(2, 0, b"batch")
    assert not (tmp_path / "journal").exists()
