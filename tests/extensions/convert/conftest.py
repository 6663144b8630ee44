"""The folders that both files convert."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.weights.models import MODELS, written


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp(request.param) / "hf", request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path / "hf", "llama")
