"""The folders that both files convert."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.models.families import OF_TYPE
from asyncrl.weights.names import FAMILIES
from tests.weights.models import MODELS, written

CONVERTED = [
    name
    for name, (kind, *_) in MODELS.items()
    if not any(rule.stacked for rule in FAMILIES[OF_TYPE[kind].architecture])  # these are refused
]


@pytest.fixture(scope="session", params=CONVERTED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp(request.param) / "hf", request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return written(tmp_path / "hf", "llama")
