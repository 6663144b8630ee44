"""scripts/bench_gpu.py runs every part to its end or its deadline, whatever became of the others, and reports all."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import psutil

from scripts.bench_gpu import OK, SKIPPED, Part, execute, execute_all, failed, page, parts


def python(name: str, code: str, deadline: float = 30.0, gpus: int = 1) -> Part:
    return Part(name, [sys.executable, "-c", code], deadline, gpus)


GOOD = python("good", 'print(\'words\'); print(\'{"gb_per_s": 12.3456, "by": {"way": 1}}\')')
BAD = python("bad", "print('the reason'); raise SystemExit(3)")


def test_part_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    bad, many, good = execute_all([BAD, python("many", "", gpus=2), GOOD], 1, tmp_path)
    assert (bad.status, bad.tail) == ("failed: exit code 3", ["the reason"])
    assert (many.status, many.figures) == (SKIPPED, {"summary": "needs 2 GPUs, here are 1"})
    assert (good.status, good.figures) == (OK, {"gb_per_s": 12.3456, "by": {"way": 1}})
    text = page([bad, many, good], {"rehearsal": True})
    assert "Rehearsal" in text
    assert "gb_per_s 12.3; by way 1" in text
    assert "the reason" in text
    assert failed([bad, many, good])
    assert not failed([many, good])


def test_part_that_hangs_ends_at_its_deadline_with_all_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    began = time.monotonic()
    outcome = execute(python("hangs", child, deadline=1.0), tmp_path / "log")
    assert time.monotonic() - began < 20.0
    assert outcome.status == "failed: not done after 1 s"
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int(outcome.tail[0]))
        assert left.status() == psutil.STATUS_ZOMBIE or left.wait(10.0) is None  # the signal may be on its way


def test_every_part_is_there_once_and_knows_its_mode() -> None:
    found = parts(quick=True, rehearse=True)
    assert len({part.name for part in found}) == len(found)
    for part in found:
        assert ("--collect-only" in part.argv) == part.name.startswith("tests-")
        assert ("--rehearse" in part.argv) != part.name.startswith("tests-")
    assert not any({"--collect-only", "--rehearse"} & set(part.argv) for part in parts(quick=False, rehearse=False))
