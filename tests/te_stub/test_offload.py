"""A trainer of TransformerEngine's layers whose storages leave the device between two updates trains the same bits, and
no FP8 copy of its weights stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import tiny_config
from tests.integration import test_offload
from tests.integration.ranks import run_ranks
from tests.te_stub.test_transformer_engine import FP8, TE


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_offload_between_updates_changes_no_bit(
    fp8: bool, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    further = {f"trainer.{name}": value for name, value in (TE | (FP8 if fp8 else {})).items()}

    def with_layers(**changes: Any) -> Any:
        return tiny_config(**changes, **{name: value for name, value in further.items() if name not in changes})

    def run(script: str, *arguments: str, world: int) -> None:
        run_ranks(str(Path(__file__).with_name(script)), *arguments, world=world)

    monkeypatch.setattr(test_offload, "tiny_config", with_layers)
    monkeypatch.setattr(test_offload, "run_ranks", run)
    test_offload.test_offload_between_updates_changes_no_bit("bfloat16", 2, experts, tmp_path)
