"""Two runs never write their weights into the same folder, nor do the two publishers of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.trainer.publishers import PublisherBuilder  # noqa: E402
from tests.fakes import addresses, tiny_config  # noqa: E402


@pytest.mark.parametrize("shared", [None, "/shared"])
def test_runs_have_folders_of_their_own(shared: str | None) -> None:
    config, unused = tiny_config(**{"weights.folder": shared}), (None,) * 4

    def folder(run: str) -> Path:
        parts: Any = config, addresses(), Path(run), *unused
        return PublisherBuilder(*parts, timeout=1.0)._folder()

    runs = ("/home/anna/a/runs/main", "/home/ben/b/runs/main")
    found = {folder(run) for run in runs}
    assert len(found) == 2
    assert all(Path(shared or "/home") in one.parents for one in found)
