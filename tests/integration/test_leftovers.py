"""A run that ended leaves nothing on its machine; the leftovers of a killed run are removed when another run begins.

If a disk is full, the run reports it.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.launch.leftovers import NOTED, PREFIX, SHARED, _mapped, _members
from tests.integration.running import (
    alive,
    descendants,
    finish,
    output,
    processes_of,
    run,
    start,
    wait_for_step,
)

pytestmark = pytest.mark.integration


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace /tmp, which other runs may use, by a folder with a short path, because sockets have names there."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_killed_run_is_cleaned_up_by_the_next(temporary: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    with start(run_dir, "run.max_steps=100000", "eval.questions=0") as process:
        wait_for_step(process, run_dir, 2)
        mapped = set().union(*map(_mapped, _members(processes_of(process, run_dir).values())))
        noted = next(temporary.glob(f"{PREFIX}*")) / NOTED
        deadline = time.monotonic() + 120
        while not {str(file) for file in mapped} <= set(json.loads(noted.read_text())["files"]):
            assert time.monotonic() < deadline, "the launcher looks every other second at first"
            time.sleep(0.1)
        started = [psutil.Process(process.pid), *descendants(process)]
        for one in started:
            one.send_signal(signal.SIGSTOP)  # none may clean up after another
        for one in started:
            one.send_signal(signal.SIGKILL)
        assert finish(process, run_dir)[0] == -signal.SIGKILL, output(run_dir)
    deadline = time.monotonic() + 60
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(started) == []
    assert mapped
    assert all(file.parent == SHARED for file in mapped)
    assert any(file.exists() for file in mapped)
    assert len(list(temporary.glob(f"{PREFIX}*"))) == 1
    run(tmp_path / "next", "run.max_steps=1", "eval.questions=0")
    # not the engines': SGLang may log a traceback of its own warm-up request (/freeze_gc)
    logs = {log.name: log.read_text() for log in (tmp_path / "next" / "logs").glob("[!e]*.log")}
    assert [name for name, text in logs.items() if "Traceback" in text or " ERROR" in text or "leaked" in text] == []
    assert [file for file in mapped if file.exists()] == []
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("asyncrl-ports-")] == []


ON_A_SMALL_DISK = (
    "mount -t tmpfs -o size=300k none '{folder}' && exec '{python}' -m asyncrl.launch.main experiment=tiny"
)


def test_full_disk_is_named_although_no_process_could_write_why(tmp_path: Path) -> None:
    """The disk has 300 KB in a mount namespace; the logs, metrics and traceback are on the full disk."""
    folder, out = tmp_path / "small", tmp_path / "out"
    folder.mkdir()
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        own = ["unshare", "--mount"]
        if subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
            pytest.skip("no mount namespaces here")
    script = ON_A_SMALL_DISK.format(folder=folder, python=sys.executable)
    settings = [f"run.dir={folder}/run", "run.max_steps=100000", "eval.questions=0", "record=true"]
    with out.open("w") as file:
        command = [*own, "sh", "-c", f'{script} "$@"', "sh", *settings]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=1200, check=False)
    text = out.read_text()
    assert done.returncode == 1, text
    assert f"No space left on device: {folder}/run. Free some space there" in text, text
