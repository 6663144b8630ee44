"""What this folder adds to a run, and that its commands leave the garbage collector alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.lookup import active
from tests.fakes import tiny_config


@pytest.mark.parametrize(("record", "commands"), [(False, ["watch"]), (True, ["watch", "inspect"])])
def test_a_finished_run_names_the_commands_that_show_it(record: bool, commands: list[str]) -> None:
    config = tiny_config(record=record)
    found = active(config)["view"].launch().offers(config, Path("runs/a"))
    assert [command for _, command in found] == [f"asyncrl-{name} runs/a" for name in commands]


def test_the_live_page_does_not_stop_the_collector() -> None:
    code = "import gc, asyncrl.extensions.view.watch.cli; assert gc.isenabled()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
