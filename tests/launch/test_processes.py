"""The supervisor with real child processes: it names the first death, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pty
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.registry import Registry
from asyncrl.errors import ProcessDied
from asyncrl.launch import leftovers, processes, run_folder
from asyncrl.launch.leftovers import SHARED, carrying
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.processes import Paused, Stopped, Supervisor
from asyncrl.launch.restarts import RestartPolicy
from asyncrl.network.addresses import LOST, PEER_FAILED, READY, STOP, STOPPED
from asyncrl.progress import end_file

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


def waits_for(path: Path, words: str = "") -> str:
    """Program that ends once a file holds these words, or after a minute."""
    return f"""
import pathlib, time
file, began = pathlib.Path({str(path)!r}), time.monotonic()
while time.monotonic() < began + 60 and not (file.exists() and {words!r} in file.read_text()): time.sleep(0.01)
"""


def spec(run_id: str, name: str, code: str, *, ends: bool = False) -> ProcessSpec:
    argv = [sys.executable, "-S", "-c", textwrap.dedent(code)]
    return ProcessSpec(name, argv, {"ASYNCRL_RUN_ID": run_id, "PYTHONUNBUFFERED": "1"}, ends_the_run=ends)


def supervise(
    run_id: str, run_dir: Path, *specs: ProcessSpec, poll: Callable[[], None] = lambda: None, grace: float = 60.0
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


class Told:
    """What the launcher says on stderr. A poll of it creates a file once these words are among it."""

    def __init__(self, capsys: pytest.CaptureFixture[str], words: str, file: Path) -> None:
        self._capsys, self._words, self._file = capsys, words, file
        self.text = ""

    def __call__(self) -> None:
        self.text += self._capsys.readouterr().err
        if self._words in self.text:
            self._file.touch()


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def test_run_ends_well_with_its_trainers(run_id: str, tmp_path: Path) -> None:
    polls = []

    def poll() -> None:
        polls.append(1)
        (tmp_path / "polled").touch()

    supervise(
        run_id,
        tmp_path,
        spec(run_id, "engine-0", FOREVER),
        spec(run_id, "trainer-0", "print('trained')", ends=True),
        spec(run_id, "trainer-1", waits_for(tmp_path / "polled") + "print('trained too')", ends=True),
        poll=poll,
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


FAILS = """
import json, os, pathlib, time
folder = pathlib.Path({run_dir!r}) / "progress"
folder.mkdir(exist_ok=True)
told = {{"process": {name!r}, "time": {time}, "error": {error!r}, "place": "/home/me/reward.py:3, in score"}}
(folder / "{name}.failure").write_text(json.dumps(told))
while not all((folder / (name + ".failure")).exists() for name in {names}):
    time.sleep(0.01)
os._exit(1)
"""
"""Fails at about the same time as the others of these names."""


def test_error_recorded_first_is_shown(run_id: str, tmp_path: Path) -> None:
    (tmp_path / "progress").mkdir()
    (tmp_path / "progress" / "router.failure").write_text("of an earlier launcher")
    names = {"trainer-0": (2.0, "Connection closed by peer"), "trainer-1": (1.0, "KeyError: 'x'")}
    codes = {
        name: FAILS.format(run_dir=str(tmp_path), name=name, names=[*names], time=at, error=error)
        for name, (at, error) in names.items()
    }
    with pytest.raises(ProcessDied) as caught:
        supervise(run_id, tmp_path, *(spec(run_id, name, code, ends=True) for name, code in codes.items()))
    assert str(caught.value) == (
        "trainer-1 died: exit code 1\n"
        "trainer-1: KeyError: 'x'\n"
        "  at /home/me/reward.py:3, in score\n"
        f"its log: {tmp_path / 'logs' / 'trainer-1.log'}\n"
        "ended afterwards: trainer-0"
    )


def test_failed_trainer_ends_the_run_despite_a_finished_one(run_id: str, tmp_path: Path) -> None:
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
    monkeypatch.setattr(processes, "COMPANION_SECONDS", 5.0)
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
    assert str(caught.value).endswith("ended afterwards: rollout")


def test_death_is_named_before_those_it_failed(run_id: str, tmp_path: Path) -> None:
    """The one that failed may take longer to end than those that it told."""
    rollout = "import time; time.sleep(1.5); raise KeyError('unforeseen')"
    with pytest.raises(ProcessDied) as caught:
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "rollout", rollout),
            spec(run_id, "trainer-0", f"import sys; sys.exit({PEER_FAILED})", ends=True),
        )
    text = str(caught.value)
    assert text.startswith("rollout died: exit code 1")
    assert "KeyError: 'unforeseen'" in text
    assert text.endswith("ended afterwards: trainer-0")


def test_accuser_is_named_when_no_other_dies(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PEER_SECONDS", 0.5)
    with pytest.raises(ProcessDied, match=f"trainer-0 died: exit code {PEER_FAILED}"):
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "rollout", FOREVER),
            spec(run_id, "trainer-0", f"import sys; sys.exit({PEER_FAILED})", ends=True),
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
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
    wait_for(lambda: not alive(run_id))  # the sweep's SIGKILL is on its way
    assert signal.getsignal(number) is before


def test_launcher_under_nohup_goes_on_without_its_terminal(run_id: str, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    hung_up = tmp_path / "hung up"

    def hang_up() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        hung_up.touch()

    try:
        trainer = spec(run_id, "trainer-0", "print('up', flush=True)" + waits_for(hung_up), ends=True)
        supervise(run_id, tmp_path, trainer, poll=when_up(tmp_path, "trainer-0", then=hang_up))
        assert hung_up.exists()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_lost_terminal_ends_everything(run_id: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    launcher = f"""
    import sys
    from pathlib import Path
    from asyncrl.errors import Stopped
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.launch.processes import Supervisor
    code = "print('up', flush=True); import time; time.sleep(60)"
    spec = ProcessSpec("trainer-0", [sys.executable, "-S", "-c", code], {{"ASYNCRL_RUN_ID": {run_id!r}}}, True)
    try:
        Supervisor([spec], Path({str(tmp_path)!r}), {run_id!r}, 1.0).run(lambda: None)
    except Stopped as stopped:
        print("stopped by", stopped, flush=True)
        sys.exit(128 + stopped.number)
    """
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(launcher)])
    log = tmp_path / "logs" / "trainer-0.log"
    wait_for(lambda: log.exists() and "up" in log.read_text())
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    wait_for(lambda: not alive(run_id))


def test_removed_run_folder_is_told(run_id: str, tmp_path: Path) -> None:
    """The process that finds it missing cannot log it there."""
    run_dir, gone = tmp_path / "run", tmp_path / "gone"
    run_dir.mkdir()

    def remove() -> None:
        shutil.rmtree(run_dir)
        gone.touch()

    trainer = spec(run_id, "trainer-0", "print('up', flush=True)" + waits_for(gone) + "raise SystemExit(1)", ends=True)
    with pytest.raises(ProcessDied) as caught:
        supervise(run_id, run_dir, trainer, poll=when_up(run_dir, "trainer-0", then=remove))
    assert f"No such file or directory: {run_dir}. It was removed or moved during the run" in str(caught.value)


def test_a_full_disk_of_the_run_is_not_blamed_on_shared_memory(run_id: str, tmp_path: Path) -> None:
    fails = f"import os; raise OSError(28, os.strerror(28), {str(tmp_path / 'hf')!r})"
    with pytest.raises(ProcessDied, match="No space left") as caught:
        supervise(run_id, tmp_path, spec(run_id, "trainer-0", fails, ends=True))
    assert "/dev/shm" not in str(caught.value)


def test_shared_memory_with_room_is_not_blamed(run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "SHARED_ENOUGH", 0)
    with pytest.raises(ProcessDied, match="No space left") as caught:
        supervise(
            run_id, tmp_path, spec(run_id, "trainer-0", "import os; raise OSError(28, os.strerror(28))", ends=True)
        )
    assert "/dev/shm" not in str(caught.value)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 7)", "raise OSError(28, os.strerror(28))"])
def test_little_shared_memory_is_told_and_swept(
    end: str, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that fills its share is killed by SIGBUS, so its file is never seen as mapped."""
    monkeypatch.setattr(leftovers, "START_NOTE_SECONDS", 0.0)
    monkeypatch.setattr(run_folder, "SHARED_ENOUGH", 1 << 60)
    known, polls = tmp_path / "known", list[int]()

    def look() -> None:
        polls.extend([1] if "up" in (tmp_path / "logs" / "trainer-0.log").read_text() else [])
        if len(polls) > 1:  # its pid was noted after the first
            known.touch()

    makes = "import os, time; print('up', flush=True)"
    fills = f"open(f'/dev/shm/torch_{{os.getpid()}}_{run_id}', 'w').close()\n{end}"
    with pytest.raises(ProcessDied, match=r"/dev/shm has \d+ MB free of \d+ MB, .*--shm-size") as caught:
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "trainer-0", f"{makes}\n{waits_for(known)}\n{fills}", ends=True),
            spec(run_id, "engine-0", FOREVER),
            poll=look,
        )
    assert "trainer-0 died" in str(caught.value)
    assert list(SHARED.glob(f"torch_*_{run_id}")) == []


def test_all_is_stopped_without_free_file_descriptors(
    run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(leftovers, "_members", fail)
    with pytest.raises(ProcessDied, match="trainer-0 died: exit code 3"):
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "engine-0", FOREVER),
            spec(run_id, "trainer-0", "raise SystemExit(3)", ends=True),
        )
    assert alive(run_id) == []


def test_process_that_ignores_sigterm_is_killed_after_the_grace(run_id: str, tmp_path: Path) -> None:
    stubborn = STUBBORN.replace("time.sleep(60)", "time.sleep(600)")
    started = time.monotonic()
    with pytest.raises(Stopped):
        supervise(
            run_id,
            tmp_path,
            spec(run_id, "trainer-0", stubborn, ends=True),
            poll=when_up(tmp_path, "trainer-0", then=send(signal.SIGTERM)),
            grace=0.3,
        )
    assert time.monotonic() - started < 300, "it was killed before its time"
    assert alive(run_id) == []


def test_second_signal_does_not_interrupt_the_stopping(run_id: str, tmp_path: Path) -> None:
    """The process has the grace to end in its time; it sends the signal itself, which thus comes while it is ending."""
    tidy = f"""
    import os, signal, sys, time
    def stop(*_):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)
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
    assert (tmp_path / "tidy").exists(), "it had its grace"
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
        wait_for(lambda: log.exists() and "up" in log.read_text())
        assert len(alive(run_id)) == 1
        process.kill()
    wait_for(lambda: not alive(run_id))


def wait_for(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)


def test_dying_engine_restarts_until_too_often(run_id: str, tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    says = "import os, sys; print('life', os.environ['ASYNCRL_INCARNATION'], flush=True); sys.exit(4)"
    engine = dataclasses.replace(spec(run_id, "engine-0", says), restarts=2, url="http://e0")
    with pytest.raises(ProcessDied, match=r"(?s)engine-0 died: exit code 4.*restarted 2 times") as caught:
        supervise(run_id, tmp_path, engine, spec(run_id, "trainer-0", FOREVER, ends=True))
    assert "life restart-2" in str(caught.value)
    assert (tmp_path / "logs" / "engine-0.log").read_text() == "life \nlife restart-1\nlife restart-2\n"


def test_engine_given_up_is_killed_and_restarted(run_id: str, tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    says = "import os, time; print('up', os.environ['ASYNCRL_INCARNATION'], flush=True); time.sleep(60)"
    engine = dataclasses.replace(spec(run_id, "engine-0", says), restarts=1, url="http://e0")
    waits = f"""
    import pathlib, time
    while "up restart-1" not in pathlib.Path({str(tmp_path / "logs" / "engine-0.log")!r}).read_text(): time.sleep(0.01)
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


# --- a run that is to go on later ---------------------------------------------------------------------------


def test_stopping_run_is_paused_once_its_trainers_say_so(run_id: str, tmp_path: Path) -> None:
    """SIGUSR1 to the launcher asks it to stop; the trainers look for the file."""
    ends = f"""
    import pathlib, time
    asked = pathlib.Path({str(tmp_path / STOP)!r})
    print("up", flush=True)
    while not asked.exists(): time.sleep(0.01)
    asked.rename({str(tmp_path / STOPPED)!r})
    """
    before = signal.getsignal(signal.SIGUSR1)
    ranks = [
        spec(run_id, "trainer-0", ends, ends=True),
        spec(run_id, "trainer-1", "import time; time.sleep(1.0)", ends=True),
    ]
    then = when_up(tmp_path, "trainer-0", then=send(signal.SIGUSR1))
    with pytest.raises(Paused):
        supervise(run_id, tmp_path, spec(run_id, "engine-0", FOREVER), *ranks, poll=then)
    assert alive(run_id) == []
    assert signal.getsignal(signal.SIGUSR1) is before


def test_run_that_ends_while_stopping_is_over(run_id: str, tmp_path: Path) -> None:
    ends = spec(run_id, "trainer-0", "import time; print('up', flush=True); time.sleep(0.5)", ends=True)
    supervise(run_id, tmp_path, ends, poll=when_up(tmp_path, "trainer-0", then=send(signal.SIGUSR1)))
    assert (tmp_path / STOP).exists()


# --- steps of a job: here a program in the place of srun ------------------------------------------------------

# As srun: SIGTERM is an order to kill, SIGUSR1 a signal to pass on.
SRUN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("killed", flush=True), sys.exit(137)))
signal.signal(signal.SIGUSR1, lambda *_: (print("asked", flush=True), sys.exit(0)))
print("up", flush=True)
time.sleep(60)
"""


def step(run_id: str, name: str, code: str = SRUN, **changes: object) -> ProcessSpec:
    facts = {"step": True, "node": "node2", "stop_signal": signal.SIGUSR1, **changes}
    return dataclasses.replace(spec(run_id, name, code), **facts)  # type: ignore[arg-type]


def test_steps_are_stopped_through_srun_each_in_its_way(run_id: str, tmp_path: Path) -> None:
    steps = step(run_id, "rollout", ends_the_run=True), step(run_id, "engine-0", stop_signal=signal.SIGTERM)
    then = when_up(tmp_path, "rollout", "engine-0", then=send(signal.SIGTERM))
    with pytest.raises(Stopped):
        supervise(run_id, tmp_path, *steps, poll=then)
    assert (tmp_path / "logs" / "rollout.log").read_text() == "up\nasked\n"
    assert (tmp_path / "logs" / "engine-0.log").read_text() == "up\nkilled\n"


def test_step_beyond_the_grace_is_ended_by_its_srun(run_id: str, tmp_path: Path) -> None:
    """SIGKILL would end the srun alone."""
    stubborn = SRUN.replace('print("asked", flush=True), sys.exit(0)', 'print("asked", flush=True)')
    then = when_up(tmp_path, "trainer", then=send(signal.SIGTERM))
    with pytest.raises(Stopped):
        supervise(run_id, tmp_path, step(run_id, "trainer", stubborn, ends_the_run=True), poll=then, grace=0.3)
    assert (tmp_path / "logs" / "trainer.log").read_text() == "up\nasked\nkilled\n"


def test_killed_launcher_has_each_srun_end_its_step(run_id: str, tmp_path: Path) -> None:
    """One that were killed with it could not."""
    (tmp_path / "logs").mkdir()
    launcher = f"""
    import sys
    from pathlib import Path
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.launch.processes import Supervisor
    argv = [sys.executable, "-S", "-c", {SRUN!r}]
    spec = ProcessSpec("trainer", argv, {{"ASYNCRL_RUN_ID": {run_id!r}}}, True, step=True)
    Supervisor([spec], Path({str(tmp_path)!r}), {run_id!r}, 1.0).run(lambda: None)
    """
    log = tmp_path / "logs" / "trainer.log"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(launcher)]) as process:
        wait_for(lambda: log.exists() and "up" in log.read_text())
        process.kill()
    wait_for(lambda: not alive(run_id))
    assert log.read_text() == "up\nkilled\n"


class Silent:
    """A watch of a process that does not answer, once."""

    def __init__(self) -> None:
        self.forgotten = 0

    def hangs(self) -> bool:
        return not self.forgotten

    def forget(self) -> None:
        self.forgotten += 1


def test_living_silent_process_is_killed_and_restarted(run_id: str, tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    (tmp_path / "logs").mkdir()
    says = "import os, time; print('life', os.environ['ASYNCRL_INCARNATION'], flush=True); time.sleep(60)"
    router = dataclasses.replace(spec(run_id, "router", says), restarts=1)
    waits = f"""
    import pathlib, time
    while "life restart-1" not in pathlib.Path({str(tmp_path / "logs" / "router.log")!r}).read_text(): time.sleep(0.01)
    """
    watches: Any = {"router": Silent()}
    policy = RestartPolicy(tmp_path, watches=watches)
    Supervisor([router, spec(run_id, "trainer-0", waits, ends=True)], tmp_path, run_id, 1.0, policy).run(lambda: None)
    assert policy.count("router") == 1


def test_router_or_last_engine_lost_ends_the_run(run_id: str, tmp_path: Path) -> None:
    """No other process can take their place."""
    (tmp_path / READY).touch()
    (tmp_path / "logs").mkdir()
    gone = "import time; time.sleep(0.2); raise SystemExit(1)"
    trainer = spec(run_id, "trainer-0", FOREVER, ends=True)
    engines = [step(run_id, f"engine-{n}", url=f"http://e{n}", node=f"node{n}", restarts=1) for n in range(2)]
    router = step(run_id, "router", gone, node="node1", restarts=1)
    policy = RestartPolicy(tmp_path, has_machine=lambda node: False)
    with pytest.raises(ProcessDied, match="router on node1 died"):
        Supervisor([*engines, router, trainer], tmp_path, run_id, 1.0, policy).run(lambda: None)
    dying = [dataclasses.replace(one, argv=[*one.argv[:-1], gone]) for one in engines]
    with pytest.raises(ProcessDied, match=r"engine-\d on node\d died"):
        Supervisor([*dying, trainer], tmp_path, run_id, 1.0, policy).run(lambda: None)


def test_death_in_a_step_is_told_with_rank_machine_and_log(run_id: str, tmp_path: Path) -> None:
    """The first by its own account; srun knows only that one of many ended."""
    (tmp_path / "progress").mkdir()
    for rank, code, at in ((0, 1, 11.0), (3, -9, 12.0), (4, 1, 10.0)):
        note = {"name": f"trainer-{rank}", "node": f"node{rank}", "code": code, "at": at}
        end_file(tmp_path, f"trainer-{rank}").write_text(json.dumps(note))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer-3.log").write_text("its last words\n")
    dying = step(run_id, "trainer", "raise SystemExit(137)", ends_the_run=True)
    with pytest.raises(ProcessDied) as caught:
        Supervisor([dying], tmp_path, run_id, 1.0).run(lambda: None)
    assert str(caught.value).startswith("trainer-3 on node3 died: killed by SIGKILL\n")
    assert "its last words" in str(caught.value)


def test_lost_engine_is_missed_while_another_serves(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / READY).touch()
    (tmp_path / "logs").mkdir()
    machines = {"node1", "node2", "node3"}
    gone = "import time; time.sleep(0.2); raise SystemExit(1)"  # nobody noted that it had begun
    told = Told(capsys, "engine-1 was lost together with the machine", tmp_path / "missed")
    engines = [
        step(run_id, "engine-0", url="http://e0", node="node2", restarts=1),
        step(run_id, "engine-1", gone, url="http://e1", node="node3", restarts=1),
    ]
    trainer = spec(run_id, "trainer-0", waits_for(tmp_path / "missed"), ends=True)
    policy = RestartPolicy(tmp_path, has_machine=lambda node: node in machines - {"node3"})
    Supervisor([*engines, trainer], tmp_path, run_id, 1.0, policy).run(told)
    assert "engine-1 was lost together with the machine node3; the run continues with 1 engines" in told.text

    alone = RestartPolicy(tmp_path, has_machine=lambda node: False)
    with pytest.raises(ProcessDied, match="engine-1 on node3 died"):
        Supervisor([engines[1], spec(run_id, "trainer-0", FOREVER, ends=True)], tmp_path, run_id, 1.0, alone).run(
            lambda: None
        )


def test_processes_that_belong_together_restart_together(run_id: str, tmp_path: Path) -> None:
    """The ranks of an engine on two machines: one dies, the other would wait for it for ever."""
    (tmp_path / READY).touch()
    life = "import os, time; print('life', os.environ['ASYNCRL_INCARNATION'], flush=True); time.sleep({seconds})"
    first = dataclasses.replace(spec(run_id, "engine-0", life.format(seconds=60)), restarts=1, together="engine-0")
    mortal = "import os; os.environ['ASYNCRL_INCARNATION'] == '' and os._exit(1)\n" + life.format(seconds=60)
    second = dataclasses.replace(spec(run_id, "engine-0.1", mortal), restarts=1, together="engine-0")
    waits = f"""
    import pathlib, time
    logs = [pathlib.Path({str(tmp_path)!r}, "logs", name + ".log") for name in ("engine-0", "engine-0.1")]
    while not all("life restart-1" in log.read_text() for log in logs): time.sleep(0.01)
    time.sleep(0.5)
    """
    supervise(run_id, tmp_path, first, second, spec(run_id, "trainer-0", waits, ends=True))
    logs = {name: (tmp_path / "logs" / f"{name}.log").read_text() for name in ("engine-0", "engine-0.1")}
    assert logs["engine-0.1"] == "life restart-1\n"
    assert logs["engine-0"].splitlines()[-1] == "life restart-1"


def test_ends_of_other_steps_are_not_told_as_its_own(run_id: str, tmp_path: Path) -> None:
    """engine-1 is no rank of engine-10."""
    (tmp_path / "progress").mkdir()
    (tmp_path / "logs").mkdir()
    end_file(tmp_path, "engine-10").write_text(
        json.dumps({"name": "engine-10", "node": "node9", "code": -9, "at": 1.0})
    )
    dying = step(run_id, "engine-1", "raise SystemExit(3)")
    with pytest.raises(ProcessDied, match="engine-1 on node2 died: its step: exit code 3"):
        Supervisor([dying, spec(run_id, "trainer-0", FOREVER, ends=True)], tmp_path, run_id, 1.0).run(lambda: None)


def test_engine_that_spans_machines_is_given_up_as_a_whole(run_id: str, tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "engine-1.log"
    gone = waits_for(log, "up") + "raise SystemExit(1)"
    specs = [
        step(run_id, "engine-0", url="http://e0", node="node1", restarts=1),
        step(run_id, "engine-1", url="http://e1", node="node2", restarts=1, together="engine-1"),
        step(run_id, "engine-1.1", gone, node="node3", restarts=1, together="engine-1"),
        spec(run_id, "trainer-0", waits_for(log, "killed"), ends=True),
    ]
    policy = RestartPolicy(tmp_path, has_machine=lambda node: node != "node3")
    Supervisor(specs, tmp_path, run_id, 1.0, policy).run(lambda: None)
    assert log.read_text() == "up\nkilled\n"


def test_leaving_engine_is_stopped_for_good(run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / READY).touch()
    registry = Registry(tmp_path)
    registry.clear()
    engines = [
        dataclasses.replace(spec(run_id, f"engine-{n}", FOREVER), restarts=1, url=f"http://e{n}:1") for n in (0, 1)
    ]
    registry.ask_to_leave("http://e1:1")
    registry.let_go("http://e1:1")
    told = Told(capsys, "engine-1 has left", tmp_path / "left")
    trains = waits_for(tmp_path / "left") + "time.sleep(0.5)"
    supervise(run_id, tmp_path, *engines, spec(run_id, "trainer-0", trains, ends=True), poll=told)
    assert "engine-1 was asked to leave" in told.text
    assert "engine-1 has left" in told.text
    assert "restarting" not in told.text
    assert registry.leaving() == set()


def test_engine_that_dies_while_it_leaves_is_not_started_again(
    run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its owner is in haste: the trainer will find it gone."""
    (tmp_path / READY).touch()
    registry = Registry(tmp_path)
    registry.clear()
    registry.ask_to_leave("http://e0:1")
    dies = dataclasses.replace(spec(run_id, "engine-0", "raise SystemExit(1)"), restarts=0, url="http://e0:1")
    supervise(run_id, tmp_path, dies, spec(run_id, "trainer-0", "import time; time.sleep(2)", ends=True))
    assert "died" not in capsys.readouterr().err


def test_fleet_supervisor_ends_with_its_last_engine(run_id: str, tmp_path: Path) -> None:
    (tmp_path / READY).touch()
    registry, heard = Registry(tmp_path), list[int]()
    registry.clear()
    engine = dataclasses.replace(spec(run_id, "engine-0", FOREVER), restarts=1, url="http://e0:1")
    started = time.monotonic()

    def each_poll() -> None:
        if not heard and time.monotonic() - started > 0.5:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_signal(number: int) -> None:
        heard.append(number)
        registry.ask_to_leave(engine.url)
        registry.let_go(engine.url)

    (tmp_path / "logs").mkdir()
    Supervisor([engine], tmp_path, run_id, 1.0, on_signal=on_signal).run(each_poll)
    assert heard == [signal.SIGTERM]
    assert not (tmp_path / STOP).exists()
