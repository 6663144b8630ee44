"""The supervisor with real child processes: it names the first death, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.addresses import LOST, READY
from asyncrl.errors import ProcessDied
from asyncrl.launch import processes
from asyncrl.launch.leftovers import carrying
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.processes import Stopped, Supervisor

FOREVER = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
# Starts a child in a session of its own, as torch's shared-memory manager does, and waits.
WITH_RUNAWAY = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", {FOREVER!r}], start_new_session=True)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def run_id(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An identity of this test alone; whatever still carries it afterwards is a failure, and is ended."""
    monkeypatch.setattr(processes, "COMPANION_SECONDS", 0.3)
    identity = secrets.token_hex(8)
    yield identity
    left = alive(identity)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def alive(run_id: str) -> list[int]:
    return carrying(f"ASYNCRL_RUN_ID={run_id}".encode())


def spec(run_id: str, name: str, code: str, *, ends: bool = False) -> ProcessSpec:
    argv = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    return ProcessSpec(name, argv, {"ASYNCRL_RUN_ID": run_id, "PYTHONUNBUFFERED": "1"}, ends_the_run=ends)


def supervise(
    run_id: str, run_dir: Path, *specs: ProcessSpec, poll: Callable[[], None] = lambda: None, grace: float = 2.0
) -> None:
    (run_dir / "logs").mkdir()
    Supervisor(list(specs), run_dir, run_id, grace).run(poll)


def when_up(run_dir: Path, *names: str, then: Callable[[], None]) -> Callable[[], None]:
    """A poll that acts once, as soon as these logs say that their process is up."""
    done = []

    def poll() -> None:
        if not done and all("up" in (run_dir / "logs" / f"{name}.log").read_text() for name in names):
            done.append(True)
            then()

    return poll


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def test_run_ends_well_when_all_trainers_have_and_the_rest_is_stopped(run_id: str, tmp_path: Path) -> None:
    polls = []
    supervise(
        run_id,
        tmp_path,
        spec(run_id, "engine-0", FOREVER),
        spec(run_id, "trainer-0", "print('trained')", ends=True),
        spec(run_id, "trainer-1", "import time; time.sleep(0.4); print('trained too')", ends=True),
        poll=lambda: polls.append(1),
    )
    assert (tmp_path / "logs" / "trainer-1.log").read_text() == "trained too\n"
    assert len(polls) >= 2  # while it ran, and once after
    assert alive(run_id) == []


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("raise SystemExit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("pass", "exit code 0"),  # an engine has no business to end at all
    ],
)
def test_first_death_is_named_with_how_and_its_last_lines(code: str, how: str, run_id: str, tmp_path: Path) -> None:
    last_words = "for i in range(40): print('line', i, flush=True)\n" + code
    with pytest.raises(ProcessDied) as caught:
        supervise(run_id, tmp_path, spec(run_id, "engine-0", last_words), spec(run_id, "trainer-0", FOREVER, ends=True))
    text = str(caught.value)
    assert text.startswith(f"engine-0 died: {how}\n")
    assert str(tmp_path / "logs" / "engine-0.log") in text
    assert "  | line 39" in text
    assert "line 19\n" not in text  # the last 20
    assert alive(run_id) == []


def test_trainer_that_fails_ends_the_run_although_another_finished(run_id: str, tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match="trainer-1 died: exit code 1"):
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "trainer-0", "pass", ends=True),
            spec(run_id, "trainer-1", "import time; time.sleep(0.3); raise SystemExit(1)", ends=True),
        )


def test_those_that_a_death_dragged_along_are_named_after_it(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "COMPANION_SECONDS", 1.0)
    follower = f"""
    import os, sys, time
    while not os.path.exists({str(tmp_path / "dead")!r}): time.sleep(0.01)
    time.sleep(0.4)
    sys.exit(1)
    """
    first = f"open({str(tmp_path / 'dead')!r}, 'w').close(); import os; os.kill(os.getpid(), 11)"
    with pytest.raises(ProcessDied) as caught:
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "engine-0", first),
            spec(run_id, "rollout", follower),
            spec(run_id, "trainer-0", FOREVER, ends=True),
        )
    assert str(caught.value).startswith("engine-0 died: killed by SIGSEGV")
    assert str(caught.value).endswith("after it died: rollout")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_everything_with_its_runaway_grandchildren(number: int, run_id: str, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    seen: list[int] = []

    def act() -> None:
        seen.extend(alive(run_id))
        os.kill(os.getpid(), number)

    with pytest.raises(Stopped) as caught:
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "engine-0", WITH_RUNAWAY),
            spec(run_id, "trainer-0", FOREVER, ends=True),
            poll=when_up(tmp_path, "engine-0", then=act),
        )
    assert caught.value.number == number
    assert len(seen) == 3
    wait_for(lambda: not alive(run_id), 2)  # the sweep's SIGKILL is on its way
    assert signal.getsignal(number) is before


def test_process_that_ignores_sigterm_is_killed_after_the_grace(run_id: str, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(Stopped):
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "trainer-0", STUBBORN, ends=True),
            poll=when_up(tmp_path, "trainer-0", then=send(signal.SIGTERM)),
            grace=0.3,
        )
    assert time.monotonic() - started < 5
    assert alive(run_id) == []


def test_process_that_takes_its_time_to_end_has_the_grace_for_it(run_id: str, tmp_path: Path) -> None:
    tidy = f"""
    import signal, sys, time
    def stop(*_):
        time.sleep(0.3)
        open({str(tmp_path / "tidy")!r}, "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)
    print("up", flush=True)
    time.sleep(60)
    """
    with pytest.raises(Stopped):
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "trainer-0", tidy, ends=True),
            poll=when_up(tmp_path, "trainer-0", then=send(signal.SIGTERM)),
        )
    assert (tmp_path / "tidy").exists()


def test_second_signal_does_not_interrupt_the_stopping(run_id: str, tmp_path: Path) -> None:
    def twice() -> None:
        threading.Timer(0.1, send(signal.SIGTERM)).start()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped):
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "trainer-0", STUBBORN, ends=True),
            poll=when_up(tmp_path, "trainer-0", then=twice),
            grace=0.5,
        )
    assert alive(run_id) == []


def test_error_while_watching_stops_everything(run_id: str, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("a bug in the console")

    with pytest.raises(RuntimeError, match="a bug in the console"):
        supervise(run_id, tmp_path, spec(run_id, "trainer-0", FOREVER, ends=True), poll=fail)
    assert alive(run_id) == []


def test_program_that_cannot_be_started_stops_those_before_it(run_id: str, tmp_path: Path) -> None:
    missing = ProcessSpec("router", ["/no/such/program"], {"ASYNCRL_RUN_ID": run_id})
    with pytest.raises(FileNotFoundError):
        supervise(run_id, tmp_path, spec(run_id, "engine-0", FOREVER), missing)
    assert alive(run_id) == []


def test_killed_launcher_leaves_no_child(run_id: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    launcher = f"""
    import sys
    from pathlib import Path
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.launch.processes import Supervisor
    code = "print('up', flush=True); import time; time.sleep(60)"
    spec = ProcessSpec("trainer-0", [sys.executable, "-S", "-c", code], {{"ASYNCRL_RUN_ID": {run_id!r}}}, True)
    Supervisor([spec], Path({str(tmp_path)!r}), {run_id!r}, 1.0).run(lambda: None)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)]) as process:
        log = tmp_path / "logs" / "trainer-0.log"
        wait_for(lambda: log.exists() and "up" in log.read_text(), 20)
        assert len(alive(run_id)) == 1
        process.kill()
    wait_for(lambda: not alive(run_id), 5)


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)


def test_engine_that_dies_under_way_is_started_again_until_it_has_died_too_often(run_id: str, tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    says = "import os, sys; print('life', os.environ['ASYNCRL_RESTARTS'], flush=True); sys.exit(4)"
    engine = dataclasses.replace(spec(run_id, "engine-0", says), restarts=2, url="http://e0")
    with pytest.raises(ProcessDied, match=r"(?s)engine-0 died: exit code 4.*started again 2 times") as caught:
        supervise(run_id, tmp_path, engine, spec(run_id, "trainer-0", FOREVER, ends=True))
    assert "life 2" in str(caught.value)
    assert (tmp_path / "logs" / "engine-0.log").read_text() == "life 0\nlife 1\nlife 2\n"


def test_engine_that_the_trainer_gave_up_is_killed_and_started_again(run_id: str, tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    says = "import os, time; print('up', os.environ['ASYNCRL_RESTARTS'], flush=True); time.sleep(60)"
    engine = dataclasses.replace(spec(run_id, "engine-0", says), restarts=1, url="http://e0")
    waits = f"""
    import pathlib, time
    while "up 1" not in pathlib.Path({str(tmp_path / "logs" / "engine-0.log")!r}).read_text(): time.sleep(0.01)
    """

    def give_up() -> None:
        (tmp_path / LOST).write_text('{"engine": "http://e0", "incarnation": "", "reason": "hangs", "time": 0}\n')

    supervise(
        run_id,
        tmp_path,
        engine,
        spec(run_id, "trainer-0", waits, ends=True),
        poll=when_up(tmp_path, "engine-0", then=give_up),
    )
