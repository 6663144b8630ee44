"""Two runs never write their weights into the same folder, nor do the two publishers of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.trainer.publishers import publish_folder  # noqa: E402


@pytest.mark.parametrize("shared", [None, "/shared"])
def test_runs_have_folders_of_their_own(shared: str | None) -> None:
    runs = ("/home/anna/a/runs/main", "/home/ben/b/runs/main")
    found = {publish_folder(shared, Path(run)) for run in runs}
    assert len(found) == 2
    assert all(Path(shared or "/home") in one.parents for one in found)
