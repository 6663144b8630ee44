"""A trainer of TransformerEngine's layers whose storages leave the device between two updates trains the same bits, and
no FP8 copy of its weights stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.variants import check_offload
from tests.te_stub.settings import FP8, TE


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_offload_between_updates_changes_no_bit(fp8: bool, experts: bool, tmp_path: Path) -> None:
    further = {f"trainer.{name}": value for name, value in (TE | (FP8 if fp8 else {})).items()}
    check_offload(tmp_path, "bfloat16", 2, experts, "tests.te_stub.ranks:moved", **further)
