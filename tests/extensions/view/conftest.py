"""A synthetic run with a straggler and a slow engine, and a client of its page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from asyncrl.extensions.view.watch.runs import RunFolder
from asyncrl.extensions.view.watch.server import app
from scripts.synthetic_run import Plan, make

TOKEN = "a token of the tests"


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six batches of four groups of four; the last episode of batch 3 waits for its tool."""
    folder = tmp_path_factory.mktemp("watch") / "run"
    return make(folder, Plan(turns=2, slow_tool=3, slow_engine=True))


@pytest.fixture
def client(run: Path) -> Iterator[TestClient]:
    with TestClient(
        app(RunFolder(run.parent), TOKEN, ["testserver"]), headers={"authorization": f"Bearer {TOKEN}"}
    ) as client:
        yield client
