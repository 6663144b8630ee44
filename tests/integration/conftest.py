"""Engines shared by several test files, which tests/conftest.py runs one after the other in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.integration.fleet import LOADER, Engines, engines

os.environ["CXX"] = "/no/compiler"
"""Compiler of torch. It is hidden from every process that a test starts, because users may have none."""


@pytest.fixture(scope="session")
def one_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start two engines behind the router, which take weights in every way."""
    folder = tmp_path_factory.mktemp("fleet")
    with engines(folder, "engine.count=2", *LOADER) as started:
        started.addresses.write(folder)
        yield started


@pytest.fixture
def two_engines(one_fleet: Engines) -> Engines:
    """Return both engines and the router, restarting any that the last test killed."""
    one_fleet.revive()
    return one_fleet
