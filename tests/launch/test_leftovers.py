"""The record of shared memory holds what processes would have to remove, and nothing of others."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.launch.leftovers import NOTED, OWNER, PREFIX, SHARED, Scratch, _mapped, _members, carrying, sweep
from tests.fakes import Clock

MAPS = """
import mmap, sys, time
held = []
for path in sys.argv[1:]:
    file = open(path, "w+b")
    file.truncate(4096)
    held.append(mmap.mmap(file.fileno(), 4096))
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.fixture
def files() -> Iterator[list[Path]]:
    made = [SHARED / f"{prefix}asyncrl-test-{os.getpid()}" for prefix in ("torch_", "sem.mp-", "users-data-")]
    yield made
    for file in made:
        file.unlink(missing_ok=True)


def test_only_what_a_process_made_for_itself_is_removed(files: list[Path]) -> None:
    environment = {**os.environ, "ASYNCRL_RUN_ID": "leftovers-test"}
    command = [sys.executable, "-c", MAPS, *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        assert _members([process.pid + 10_000_000]) == set()  # of other groups
        found = set().union(*map(_mapped, _members([process.pid])))
        assert found == set(files[:2])
        sweep("another-run", [])
        assert process.poll() is None
        sweep("leftovers-test", found)
        assert process.wait(60) != 0
    assert [file.exists() for file in files] == [False, False, True]


def test_files_that_another_living_process_maps_are_kept(files: list[Path]) -> None:
    """Engines that join a run map the trainer's memory: the end of those engines must not take it from the trainer."""
    command = [sys.executable, "-c", MAPS, *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"mapped\n"
        sweep("engines-elsewhere", files[:2])
        assert [file.exists() for file in files] == [True] * 3
        trainer.kill()
    sweep("engines-elsewhere", files[:2])
    assert [file.exists() for file in files] == [False, False, True]


LAUNCHER = f"""
import os, subprocess, sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from asyncrl.launch.leftovers import Scratch

scratch = Scratch(os.environ["MARK"])
code = {MAPS!r}.replace('print(', 'import tempfile; held.append(tempfile.mkdtemp()); print(')
env = {{**os.environ, **scratch.environment, "ASYNCRL_RUN_ID": os.environ["MARK"]}}
child = subprocess.Popen([sys.executable, "-c", code, *sys.argv[1:]], env=env, start_new_session=True)
while not scratch._noted:
    scratch._noted_at = -1000.0
    scratch.note([child.pid])
    time.sleep(0.05)
print(scratch.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Replace /tmp, where other runs may be active."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_next_launcher_removes_what_a_killed_one_has_left(temporary: Path, files: list[Path]) -> None:
    """SIGKILL of the launcher: its process lives on in a session of its own, and so do its files."""
    mark = secrets.token_hex(8)
    environment = {**os.environ, "MARK": mark}
    command = [sys.executable, "-c", LAUNCHER, *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as launcher:
        assert launcher.stdout
        lines = [launcher.stdout.readline().strip() for _ in range(2)]
        folder = Path(lines[lines[0] == "mapped"])
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o711
        assert any(folder.glob("tmp*"))
        Scratch("another").remove()  # the launcher lives: nothing of it is touched
        assert [file.exists() for file in files] == [True] * 3
        assert any(folder.glob("tmp*"))
        launcher.kill()
        launcher.wait(60)
    assert carrying(f"ASYNCRL_RUN_ID={mark}".encode())
    Scratch("another").remove()
    assert carrying(f"ASYNCRL_RUN_ID={mark}".encode()) == []
    assert [file.exists() for file in files] == [False, False, True]
    assert list(temporary.iterdir()) == []


def test_foreign_folder_or_list_is_let_alone(temporary: Path, files: list[Path]) -> None:
    for file in files:
        file.touch()
    listed = [str(files[2]), "/dev/shm/../../etc/hostname", str(temporary / "torch_mine"), str(SHARED / "torch_" / "x")]
    (temporary / "torch_mine").touch()
    abandoned = temporary / f"{PREFIX}abc"
    abandoned.mkdir()
    (abandoned / OWNER).touch()
    told = {"variable": "ASYNCRL_RUN_ID", "value": secrets.token_hex(8), "files": listed}
    (abandoned / NOTED).write_text(json.dumps(told))
    (temporary / f"{PREFIX}link").symlink_to(files[0].parent)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    unowned = temporary / f"{PREFIX}new"
    unowned.mkdir()
    (unowned / OWNER).symlink_to(elsewhere / "kept")
    Scratch("another").remove()
    assert not abandoned.exists()
    assert all(file.exists() for file in files)
    assert Path("/etc/hostname").exists()
    assert (temporary / "torch_mine").exists()
    assert unowned.exists()
    assert (elsewhere / "kept").exists()


def test_looks_become_rare_when_a_run_is_under_way(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(), []
    monkeypatch.setattr("asyncrl.launch.leftovers._members", lambda leaders: looks.append(clock.now) or set())
    scratch = Scratch("mine", clock=clock)
    for _ in range(6000):
        clock.now += 0.1
        scratch.note([])
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert gaps[:50] == pytest.approx([2.0] * 50, abs=0.2)
    assert gaps[-1] == pytest.approx(60.0, abs=0.2)
    scratch.starts()
    for _ in range(100):
        clock.now += 0.1
        scratch.note([])
    assert looks[-1] - looks[-2] == pytest.approx(2.0, abs=0.2), "a process was started again"
    scratch.remove()
