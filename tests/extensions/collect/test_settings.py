"""mode=rollout_only: what runs, what is refused, and what its process needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.placement import imagined, place
from asyncrl.launch.plan import plan
from asyncrl.launch.resume import advice
from tests.fakes import addresses, tiny_config

ALONE = {"mode": "rollout_only", "record": True}


def test_process_takes_batches_for_the_trainers_and_ends_it() -> None:
    config = tiny_config(**ALONE)
    specs = plan(config, addresses(), place(config, imagined(config, 1, 0)), Path("/runs/r"))
    assert [spec.name for spec in specs] == ["engine-0", "router", "rollout", "collect"]
    assert [spec.name for spec in specs if spec.ends_the_run] == ["collect"]
    assert specs[-1].argv[-2:] == ["asyncrl.extensions.collect.program", "/runs/r"]
    assert (config.trains, config.generates) == (False, True)


def test_stopped_run_is_not_told_to_set_what_is_refused(tmp_path: Path) -> None:
    assert advice(tmp_path, [], tiny_config(**ALONE)) == "; it has no checkpoint, so it starts over"
    assert "(checkpoint.every)" in advice(tmp_path, [], tiny_config())


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"record": False}, "record", "set true"),
        ({"resume": "auto"}, "resume", "starts from the beginning"),
        ({"checkpoint.every": 2}, "checkpoint.every", "trains nothing"),
    ],
)
def test_a_run_that_leaves_nothing_or_would_go_on_is_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        tiny_config(**ALONE | changes)
    assert refused.value.field == field


def test_the_process_imports_no_torch() -> None:
    code = "import sys, asyncrl.extensions.collect.program; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
