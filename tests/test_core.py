"""`make core` deletes extensions as their pages say."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import core


def test_deletion_takes_what_a_page_names_and_sets_its_defaults(tmp_path: Path) -> None:
    page = tmp_path / core.EXTENSIONS / "gone" / "README.md"
    defaults, test = tmp_path / "conf/some.yaml", tmp_path / "tests/test_gone.py"
    for file in (page, defaults, test):
        file.parent.mkdir(parents=True)
    page.write_text(
        "## Delete it\n\nSet nothing; set `most: null` in\n`conf/some.yaml`. Remove it with `tests/test_gone.py`.\n"
    )
    defaults.write_text("least: 1\nmost: auto\n")
    test.touch()
    assert core.delete(tmp_path, "gone") == ["asyncrl/extensions/gone", "tests/test_gone.py"]
    assert not page.parent.exists()
    assert not test.exists()
    assert defaults.read_text() == "least: 1\nmost: null\n"


def test_extension_that_is_not_committed_is_refused() -> None:
    with pytest.raises(SystemExit, match="nobody"):
        list(core.cases(["nobody"]))


def test_all_is_the_core_with_what_a_machine_without_gpus_needs() -> None:
    ((name, gone, what),) = core.cases([core.ALL])
    assert name == "the core"
    assert core.KEPT & {*gone} == set()
    assert {"tests/rollout", "tests/trainer"} <= {*what["tests"]}
