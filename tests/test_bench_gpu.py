"""scripts/bench_gpu.py runs every part to its end or its deadline, whatever became of the others, and reports all."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.bench_gpu import LEFT, OK, SKIPPED, Part, Results, execute, execute_all, parts, passed


def python(name: str, code: str, deadline: float = 30.0, gpus: int = 1, usual: float = 0.0) -> Part:
    return Part(name, [sys.executable, "-c", code], deadline, gpus, usual)


GOOD = python("good", 'print(\'words\'); print(\'{"gb_per_s": 12.3456, "by": {"way": 1}}\')')
BAD = python("bad", "print('the reason'); raise SystemExit(3)")


def test_part_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path, {"rehearsal": True})
    execute_all([BAD, python("many", "", gpus=2), GOOD], 1, results)
    bad, many, good = results.outcomes
    assert (bad.status, bad.tail) == ("failed: exit code 3", ["the reason"])
    assert (many.status, many.figures) == (SKIPPED, {"summary": "needs 2 GPUs, here are 1"})
    assert (good.status, good.figures) == (OK, {"gb_per_s": 12.3456, "by": {"way": 1}})
    assert "gb_per_s 12.3; by way 1" in capsys.readouterr().out
    assert results.failed
    written = json.loads(results.path.read_text())
    assert written["rehearsal"]
    assert [part["name"] for part in written["parts"]] == ["bad", "many", "good"]
    assert passed(results.path) == {"good"}
    assert Results(tmp_path, {}).path != results.path  # what was measured is never overwritten


def test_measurements_are_written_before_the_next_part(tmp_path: Path) -> None:
    results = Results(tmp_path, {})
    file = repr(str(results.path))
    reads = f"import json; print(json.dumps({{'seen': len(json.load(open({file}))['parts'])}}))"
    execute_all([GOOD, python("reads", reads)], 1, results)
    assert results.outcomes[1].figures == {"seen": 1}


def test_parts_keep_to_the_minutes_that_are_left(tmp_path: Path) -> None:
    results = Results(tmp_path, {})
    slow = python("slow", "import time; time.sleep(600)")
    execute_all([python("long", "", usual=900.0), slow, GOOD], 1, results, ends=time.monotonic() + 2.0)
    long, cut, none = results.outcomes
    assert long.status == LEFT  # a shorter part of less value uses the time
    assert cut.status.startswith("failed: not done after")
    assert (none.status, results.failed) == (LEFT, True)


def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"parts": [1]}')
    with pytest.raises(SystemExit, match=r"--after .*other\.json"):
        passed(tmp_path / "other.json")


def test_hanging_part_ends_with_all_it_started(tmp_path: Path) -> None:
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
