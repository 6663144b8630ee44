"""A step's task: it starts what its file says, stops it as it is told, leaves nothing, and tells how it ended."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.extensions.slurm.task import COUNTED_SECONDS, MARK, MISSED, SlurmTask, Watched
from asyncrl.launch.leftovers import carrying
from asyncrl.launch.stalls import stack_file
from asyncrl.leases import Lease
from asyncrl.progress import DUMP_SIGNAL, begin_file, end_file
from tests.fakes import Clock

ROOT = Path(__file__).resolve().parents[3]
WAIT = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + WAIT
RUNAWAY = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}], start_new_session=True)"
DIE = "import os; os.kill(os.getpid(), 9)"


def begun(folder: Path, code: str, *, rank: int = 0, **changes: object) -> subprocess.Popen[bytes]:
    facts = {"name": "it", "run_id": secrets.token_hex(4), "env": {"COLOUR": "red"}, "stop_signal": signal.SIGTERM}
    task = SlurmTask(
        **{**facts, "argv": [sys.executable, "-c", code], "grace": 60.0, "run_dir": str(folder), **changes}
    )  # type: ignore[arg-type]
    (folder / "progress").mkdir(exist_ok=True)
    task.write(folder / "file")
    assert (folder / "file").stat().st_mode & 0o077 == 0
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_PROCID": str(rank), "SLURMD_NODENAME": "node7"}
    argv = [sys.executable, "-m", "asyncrl.extensions.slurm.task", str(folder / "file")]
    with (folder / "out").open("wb") as out:
        return subprocess.Popen(argv, env=env, stdout=out, stderr=out)


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end_of(folder: Path, name: str = "it") -> dict[str, object]:
    return json.loads(end_file(folder, name).read_text())  # type: ignore[no-any-return]


def test_process_has_its_environment_and_its_rank_has_its_own(tmp_path: Path) -> None:
    code = "import os; print(os.environ['COLOUR'], os.environ['RANK'], os.environ['ASYNCRL_TASK'])"
    run = begun(tmp_path, code, rank=1, ranks=[{"RANK": "0"}, {"RANK": "1"}], run_id="r")
    assert run.wait(50) == 0
    assert (tmp_path / "out").read_text() == "red 1 r/it-1\n"
    assert begin_file(tmp_path, "it-1").exists()
    assert not end_file(tmp_path, "it-1").exists()  # nothing to tell


@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", 3), (DIE, 137)])
def test_an_end_of_its_own_is_told_with_the_machine(tmp_path: Path, code: str, expected: int) -> None:
    assert begun(tmp_path, code).wait(50) == expected
    end = end_of(tmp_path)
    assert (end["name"], end["node"], end["code"]) == ("it", "node7", 3 if expected == 3 else -9)


@pytest.mark.parametrize(("code", "number"), [(WAIT, signal.SIGTERM), (STUBBORN, signal.SIGKILL)])
def test_process_is_asked_to_stop_and_then_killed(tmp_path: Path, code: str, number: int) -> None:
    run = begun(tmp_path, code, grace=0.5 if code == STUBBORN else 60.0)
    until(lambda: "up" in (tmp_path / "out").read_text())
    run.send_signal(signal.SIGUSR1)
    assert run.wait(50) == 128 + number
    assert not end_file(tmp_path, "it").exists()  # it was asked to


def test_asking_again_does_not_put_the_end_off(tmp_path: Path) -> None:
    run = begun(tmp_path, STUBBORN, grace=0.5)
    until(lambda: "up" in (tmp_path / "out").read_text())
    deadline = time.monotonic() + 50
    while run.poll() is None:
        assert time.monotonic() < deadline
        run.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert run.returncode == 128 + signal.SIGKILL


def test_signal_to_all_of_a_step_reaches_the_task_alone(tmp_path: Path) -> None:
    """Slurm signals every process of a step: SIGUSR1 would kill one that does not expect it."""
    code = "import signal; print('up', signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN, flush=True);" + WAIT
    run = begun(tmp_path, code)
    until(lambda: "up True" in (tmp_path / "out").read_text())
    run.send_signal(signal.SIGUSR1)
    assert run.wait(50) == 128 + signal.SIGTERM


def test_whatever_has_left_its_group_is_ended(tmp_path: Path) -> None:
    identity = secrets.token_hex(4)
    assert begun(tmp_path, RUNAWAY, run_id=identity).wait(50) == 0
    assert carrying(f"{MARK}={identity}/it".encode()) == []


def test_file_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "asyncrl.extensions.slurm.task", str(tmp_path / "file")]
    (tmp_path / "progress").mkdir()
    with subprocess.Popen(argv, env=env) as run:
        time.sleep(1.0)
        SlurmTask(
            "it", "r", [sys.executable, "-c", "raise SystemExit(5)"], {}, signal.SIGTERM, 1.0, str(tmp_path)
        ).write(tmp_path / "file")
        assert run.wait(50) == 5


def test_task_that_is_killed_takes_its_process_along(tmp_path: Path) -> None:
    """Slurm kills like this after its grace period, and so does a machine that runs out of memory."""
    identity = secrets.token_hex(4)
    run = begun(tmp_path, WAIT, run_id=identity)
    until(lambda: "up" in (tmp_path / "out").read_text())
    run.kill()
    run.wait(50)
    until(lambda: carrying(f"{MARK}={identity}/it".encode()) == [])


def test_tasks_of_a_dead_launcher_end_and_one_speaks(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    folder.mkdir()
    lease, said = Lease(tmp_path / "run.lease", {}), tmp_path / "said"
    lease.renew()
    orphaned = [sys.executable, "-c", f"open({str(said)!r}, 'a').write('once')"]
    runs = []
    for _ in range(2):
        watch = {"lease": str(tmp_path / "run.lease"), "lost_timeout": 1.0, "look_seconds": 0.3}
        runs.append(begun(folder, WAIT, run_id="orphans", orphaned=orphaned, **watch))
        until(lambda: begin_file(folder, "it").exists())
        begin_file(folder, "it").unlink()
    for run in runs:
        assert run.wait(50) == 128 + signal.SIGKILL
    assert said.read_text() == "once"
    assert carrying(f"{MARK}=orphans/it".encode()) == []


def test_launcher_that_was_never_seen_is_waited_for(tmp_path: Path) -> None:
    """A file system may show the lease late."""
    watch = {"lease": str(tmp_path / "none.lease"), "lost_timeout": 0.1, "look_seconds": 0.1}
    assert begun(tmp_path, "import time; time.sleep(2)", **watch).wait(50) == 0


def test_asked_task_writes_what_its_process_is_doing(tmp_path: Path) -> None:
    """Slurm passes the signal to all processes of the step: it is for the task alone."""
    (tmp_path / "logs").mkdir()
    code = "import time\ndef stands_here():\n    print('up', flush=True); time.sleep(60)\nstands_here()"
    run = begun(tmp_path, code, ranks=[{}, {}], rank=1)
    until(lambda: "up" in (tmp_path / "out").read_text())
    run.send_signal(DUMP_SIGNAL)
    os.kill(json.loads(begin_file(tmp_path, "it-1").read_text())["pid"], DUMP_SIGNAL)
    stack = stack_file(tmp_path / "logs", "it-1")
    until(stack.exists)
    assert "stands_here (<string>:3)" in stack.read_text()
    assert run.poll() is None
    run.send_signal(signal.SIGUSR1)
    assert run.wait(50) == 128 + signal.SIGTERM


@pytest.mark.parametrize("ends", ["is renewed no more", "is removed"])
def test_watched_lease_ended_when_it_was_missed_repeatedly(tmp_path: Path, ends: str) -> None:
    clock = Clock()
    lease = Lease(tmp_path / "e0.lease", {}, clock)
    watched = Watched(tmp_path / "e0.lease", 60.0, clock)

    def asked(times: int) -> list[bool]:
        found = []
        for _ in range(times):
            clock.now += COUNTED_SECONDS
            found.append(watched.ended())
        return found

    assert not any(asked(20))  # it has not come yet
    lease.renew()
    assert not any(asked(5))
    if ends == "is removed":
        lease.end()
        assert asked(MISSED) == [False] * (MISSED - 1) + [True]
    else:
        assert not any(asked(2))
        assert asked(MISSED + 1)[-1]


def test_watched_lease_that_is_missed_once_holds(tmp_path: Path) -> None:
    clock = Clock()
    lease = Lease(tmp_path / "e0.lease", {}, clock)
    watched = Watched(tmp_path / "e0.lease", 60.0, clock)
    for _ in range(6):
        lease.renew()
        clock.now += COUNTED_SECONDS
        assert not watched.ended()
        lease.end()
        clock.now += COUNTED_SECONDS
        assert not watched.ended()


def test_watcher_reads_nobody_elses_lease(tmp_path: Path) -> None:
    clock = Clock()
    lease = Lease(tmp_path / "e0.lease", {}, clock)
    lease.renew()
    Lease(tmp_path / "e1.lease", {}, clock).renew()
    assert Watched(tmp_path / "e0.lease", 60.0, clock).look().keys() == {"e0"}
