"""Engines that several files share: tests/conftest.py runs these files one after the other in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.fleet import Engines, engines

os.environ["CXX"] = "/no/compiler"
"""What torch would compile with: every process that a test starts must do without, for users may have none."""


@pytest.fixture(scope="session")
def one_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start two engines behind the router, which take changes of weights too (delta)."""
    folder = tmp_path_factory.mktemp("fleet")
    with engines(folder, "engine.count=2", "weights.transport=delta") as started:
        started.addresses.write(folder)
        yield started


@pytest.fixture
def two_engines(one_fleet: Engines) -> Engines:
    """Both engines and the router, whichever of them the last test has killed."""
    one_fleet.revive()
    return one_fleet
