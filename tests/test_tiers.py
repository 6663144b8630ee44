"""The lists of tests/tiers.py name tests that exist, and every file belongs to one part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers import DAILY, INTEGRATION, NIGHTLY, STRUCTURE, chosen, tier

ROOT = Path(__file__).parents[1]
WHOLE = [f"{INTEGRATION}test_{entry if '::' in entry else f'{entry}::'}".replace("::", ".py::") for entry in DAILY]


@pytest.mark.parametrize("entry", [*WHOLE, *NIGHTLY, *STRUCTURE])
def test_every_entry_names_a_test(entry: str) -> None:
    file, _, function = entry.partition("::")
    name, bracket, _ = function.partition("[")
    assert f"def {name or 'test_'}{'(' if bracket else ''}" in (ROOT / file).read_text()


def test_new_integration_file_is_nightly_a_unit_test_daily() -> None:
    assert tier("tests/integration/test_new.py::test_it") == "nightly"
    assert tier("tests/algo/test_new.py::test_it") is None


def test_parts_cover_every_file_once() -> None:
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py")]
    parts = [{file for file in files if chosen(file, f"{number}/6")} for number in range(6)]
    assert sum(map(len, parts)) == len(files) == len(set.union(*parts))
    assert min(map(len, parts)) > 0
