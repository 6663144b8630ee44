"""Processes that import much do so without garbage collections, and have them again when they begin to work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "asyncrl"


def test_collector_rests_until_all_is_imported_and_then_passes_over_it() -> None:
    code = (
        "import gc; from asyncrl import importing; assert not gc.isenabled(); importing.done();"
        "assert gc.isenabled(); assert gc.get_freeze_count() > 1000; a = []; a.append(a); del a; assert gc.collect()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("entry", ["engine/serve.py", "rollout/__main__.py", "trainer/__main__.py"])
def test_each_entry_imports_it_first_and_says_when_it_is_done(entry: str) -> None:
    lines = [line.strip() for line in (PACKAGE / entry).read_text().splitlines()]
    imports = [line for line in lines if line.startswith(("import ", "from "))]
    assert next(line for line in imports if "__future__" not in line) == "from asyncrl import importing"
    assert lines.count("importing.done()") == 1


def test_nothing_else_stops_the_collector() -> None:
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "importing" in path.read_text()}
    entries = {path for path in users if "import importing" in (PACKAGE / path).read_text()}
    assert entries == {"engine/serve.py", "rollout/__main__.py", "trainer/__main__.py"}
