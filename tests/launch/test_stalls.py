"""A process that lives and does not go on is found within its deadline, and named before those that wait for it."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from asyncrl.errors import ProcessDied
from asyncrl.launch.leftovers import carrying
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.processes import Supervisor
from asyncrl.launch.stalls import SHOWN, Stalled, Stalls, innermost, stack_file, state, write_stack
from asyncrl.network.addresses import READY
from asyncrl.progress import FOLDER, Progress, failing, failures
from tests.fakes import Clock

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 100.0
EVERY = 5.0

RANK = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from asyncrl.progress import Progress

def waits_for_ever():
    while True:
        time.sleep(600)

progress = Progress(Path(sys.argv[1]), os.environ["NAME"], float(os.environ["PATIENCE"]))
progress.watch()
progress.doing("step 3, training")
progress.part("micro-batch 2 of 8")
print("up", flush=True)
if os.environ["HANGS"] == "yes":
    waits_for_ever()
while True:
    time.sleep(float(os.environ["EVERY"]))
    progress.part("micro-batch 2 of 8")
"""


@pytest.fixture
def clock() -> Clock:
    return Clock()


class Ranks:
    """Two ranks and who watches them, on one clock."""

    def __init__(self, run_dir: Path, clock: Clock) -> None:
        self.clock = clock
        self.stalls = Stalls(run_dir, ["trainer-0", "trainer-1"], PATIENCE, clock, begin=0.0)
        self.rank = [Progress(run_dir, f"trainer-{rank}", PATIENCE, clock) for rank in range(2)]

    def pass_time(self, seconds: float, renewing: tuple[int, ...] = (0, 1), working: tuple[int, ...] = (0, 1)) -> list:
        end = self.clock.now + seconds
        found = []
        while self.clock.now < end and not found:
            self.clock.now += EVERY
            for rank in working:
                self.rank[rank].part("another")
            for rank in renewing:
                self.rank[rank].renew()
            found = self.stalls.find()
        return found


@pytest.fixture
def ranks(tmp_path: Path, clock: Clock) -> Ranks:
    return Ranks(tmp_path, clock)


def test_ranks_that_go_on_are_left_in_peace(ranks: Ranks) -> None:
    assert ranks.pass_time(10 * PATIENCE) == []


def test_rank_stuck_in_a_micro_batch_is_found(ranks: Ranks) -> None:
    ranks.pass_time(20.0)
    ranks.rank[1].doing("step 3, training")
    ranks.rank[1].part("micro-batch 2 of 8")
    assert ranks.pass_time(PATIENCE - 2 * EVERY, working=(0,)) == []
    (found,) = ranks.pass_time(4 * EVERY, working=(0,))
    assert (found.name, found.doing, found.silent) == ("trainer-1", "step 3, training, micro-batch 2 of 8", False)
    assert found.seconds == pytest.approx(PATIENCE, abs=2 * EVERY)


def test_wait_has_the_time_that_it_asks_for(ranks: Ranks) -> None:
    for rank in ranks.rank:
        rank.doing("waiting for a batch", within=5 * PATIENCE)
    assert ranks.pass_time(4.5 * PATIENCE, working=()) == []
    assert {one.name for one in ranks.pass_time(PATIENCE, working=())} == {"trainer-0", "trainer-1"}


def test_silent_rank_is_named_before_those_that_wait(ranks: Ranks) -> None:
    """However long it may wait: a process that is stopped renews nothing."""
    ranks.pass_time(20.0)
    for rank in ranks.rank:
        rank.doing("waiting for a batch", within=50 * PATIENCE)
    ranks.pass_time(EVERY, working=())
    found = ranks.pass_time(2 * PATIENCE, renewing=(1,), working=())
    assert [(one.name, one.doing, one.silent) for one in found] == [("trainer-0", "waiting for a batch", True)]


def test_rank_that_has_ended_or_has_not_begun(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks.pass_time(PATIENCE - 2 * EVERY, renewing=(0,), working=(0,)) == []
    assert [one.name for one in ranks.pass_time(3 * EVERY, renewing=(0,), working=(0,))] == ["trainer-1"]
    ranks = Ranks(tmp_path, ranks.clock)
    assert ranks.pass_time(PATIENCE / 2) == []
    ranks.rank[1].end()
    assert ranks.pass_time(3 * PATIENCE, renewing=(0,), working=(0,)) == []


def test_time_in_which_nobody_could_look_is_not_counted(ranks: Ranks) -> None:
    """A job that Slurm suspends, a laptop that sleeps: the launcher was stopped, too."""
    ranks.pass_time(20.0)
    ranks.rank[0].part("micro-batch 2 of 8")
    ranks.clock.now += 100 * PATIENCE
    assert ranks.pass_time(PATIENCE / 2, working=(1,)) == []
    assert ranks.pass_time(PATIENCE, working=(1,)) != []


def test_unwatched_time_is_not_counted(tmp_path: Path, clock: Clock) -> None:
    stalls = Stalls(tmp_path, ["trainer-0"], PATIENCE, clock, begin=3 * PATIENCE)

    def found_after(seconds: float) -> list:
        clock.now += seconds
        return stalls.find()

    assert found_after(100 * PATIENCE) == []  # suspended
    waited = 0.0
    while not found_after(EVERY):
        waited += EVERY
        assert waited < 4 * PATIENCE
    assert waited > 2 * PATIENCE


def test_folder_that_cannot_be_read_is_nobodys_fault(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.pass_time(20.0)

    def refuses(*_: object) -> list[str]:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("asyncrl.leases.os.listdir", refuses)
        patched.setattr(Path, "read_text", refuses)
        assert ranks.pass_time(3 * PATIENCE, renewing=()) == []


def test_message_names_the_first_and_tells_of_the_others(ranks: Ranks, tmp_path: Path) -> None:
    ranks.pass_time(20.0)
    found = ranks.pass_time(3 * PATIENCE, renewing=(0,), working=(0,))
    stack_file(tmp_path, "trainer-1").write_text(
        'stopped by a signal\nProcess 7: python\nPython v3.11\n\nThread 78 (idle): "other"\n    a (a.py:1)\n'
        'Thread 7 (idle): "MainThread"\n    all_reduce (ddp.py:12)\n    main (b.py:3)\n'
    )
    text = ranks.stalls.message(found, tmp_path)
    assert text.startswith("trainer-1 makes no progress: ")
    assert "cluster.stall_timeout (100 s)" in text
    assert "trainer-1: stopped by a signal; starting, another, for 1" in text
    assert text.index("; in all_reduce (ddp.py:12)") < text.index("trainer-0: unknown state; starting, another")


def test_message_of_a_thousand_ranks_is_short(tmp_path: Path, clock: Clock) -> None:
    stalls = Stalls(tmp_path, [f"trainer-{rank}" for rank in range(1000)], PATIENCE, clock)
    found = []
    while not found:
        clock.now += EVERY
        found = stalls.find()
    text = stalls.message(found, tmp_path)
    assert len(text.splitlines()) == SHOWN + 3
    assert "and 992 more" in text
    assert "it has not reported any progress in the" in text


def test_files_of_an_earlier_life_are_removed(tmp_path: Path, clock: Clock) -> None:
    Progress(tmp_path, "trainer-0", PATIENCE, clock).renew()
    assert list((tmp_path / FOLDER).iterdir())
    Stalls(tmp_path, ["trainer-0"], PATIENCE, clock)
    assert not list((tmp_path / FOLDER).iterdir())


def test_loop_that_a_user_blocks_does_not_go_on(tmp_path: Path) -> None:
    """A reward that waits without await: the process lives, renews its file, and serves nobody."""
    progress = Progress(tmp_path, "rollout", 1.0)
    stalls = Stalls(tmp_path, ["rollout"], 1.0)
    progress.watch()
    found = []

    async def serve() -> None:
        following = asyncio.create_task(progress.follow())
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            await asyncio.sleep(0.05)
            assert stalls.find() == []
        while not found and time.monotonic() < end + 10:
            time.sleep(0.05)  # noqa: ASYNC251  (what a user does)
            found.extend(stalls.find())
        following.cancel()

    asyncio.run(serve())
    progress.end()
    (stalled,) = found
    assert (stalled.name, stalled.doing, stalled.silent) == ("rollout", "serving", False)


def test_stack_of_a_stopped_process_is_read_from_outside(tmp_path: Path) -> None:
    code = "import time\ndef stands_here():\n    print('up', flush=True); time.sleep(60)\nstands_here()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGSTOP)
        while state(child.pid) != "stopped by a signal":
            time.sleep(0.01)
        write_stack(child.pid, stack_file(tmp_path, "it"))
        lines = stack_file(tmp_path, "it").read_text().splitlines()
        child.kill()
    assert lines[0] == "stopped by a signal"
    assert innermost(lines) == "; in stands_here (<string>:3)"
    assert state(child.pid) == "dead"


def test_stall_behind_an_error_of_the_user_names_the_error_first(tmp_path: Path) -> None:
    """Others wait for who is ending with it."""

    class Waiting(Stalls):
        def find(self) -> list[Stalled]:
            return [Stalled("trainer-0", "step 3, waiting for its batch", 200.0, silent=False)] if noted else []

    noted: list[bool] = []

    def note() -> None:
        with suppress(KeyError), failing(tmp_path, "rollout"):
            raise KeyError("planted")
        noted.append(True)

    (tmp_path / "logs").mkdir()
    spec = ProcessSpec("trainer-0", [sys.executable, "-c", "import time; time.sleep(60)"], {}, ends_the_run=True)
    supervisor = Supervisor([spec], tmp_path, secrets.token_hex(8), 1.0, stalls=Waiting(tmp_path, [], PATIENCE))
    with pytest.raises(ProcessDied) as raised:
        supervisor.run(note)
    first, place, second, *_ = str(raised.value).splitlines()
    assert first == "rollout: KeyError: 'planted'"
    assert place.startswith(f"  at {__file__}:")
    assert second.startswith("trainer-0 makes no progress")


CALLED_BACK = """
import sys
from pathlib import Path
import torch
from asyncrl.errors import AsyncRLError
from asyncrl.progress import failing

@torch.no_grad()
def refuses():
    raise AsyncRLError("refused") if sys.argv[2] == "ours" else KeyError("unforeseen")

with failing(Path(sys.argv[1]), "trainer-0"):
    refuses()
"""


@pytest.mark.parametrize(("whose", "named"), [("ours", False), ("unforeseen", True)])
def test_our_own_errors_do_not_blame_a_package_that_called(whose: str, named: bool, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CALLED_BACK, tmp_path, whose], capture_output=True, check=False)
    (failure,) = failures(tmp_path)
    assert ("torch" in failure["place"]) is named


@pytest.mark.parametrize("py_spy", [True, False], ids=["py-spy", "without"])
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "hangs"])
def test_run_ends_and_says_what_each_was_doing(
    stopped: bool, py_spy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without py-spy a process that still responds writes its stacks to its log; for a stopped one there are its state
    and its last report. The other rank has time: it may be held up by the machine, and py-spy reads it best while it
    sleeps."""
    run_id = secrets.token_hex(8)
    (tmp_path / "logs").mkdir()
    if not py_spy:
        monkeypatch.setattr("asyncrl.launch.stalls.shutil.which", lambda *_, **__: None)
        monkeypatch.setattr("asyncrl.launch.processes.ANSWER_SECONDS", 0.5 if stopped else 5.0)

    def spec(rank: int) -> ProcessSpec:
        hangs = "yes" if rank == 1 and not stopped else "no"
        env = {"ASYNCRL_RUN_ID": run_id, "NAME": f"trainer-{rank}", "HANGS": hangs}
        env |= {"PATIENCE": "2", "EVERY": "0.05"} if rank == 1 else {"PATIENCE": "20", "EVERY": "2"}
        argv = [sys.executable, "-c", RANK, str(tmp_path)]
        return ProcessSpec(f"trainer-{rank}", argv, env, ends_the_run=True, reports=True)

    acted = []

    def stop_one() -> None:
        told = tmp_path / FOLDER / "trainer-1.lease"
        if stopped and not acted and told.exists() and "micro-batch" in told.read_text():
            (pid,) = {*carrying(b"NAME=trainer-1")} & {*carrying(f"ASYNCRL_RUN_ID={run_id}".encode())}
            os.kill(pid, signal.SIGSTOP)
            acted.append(pid)

    stalls = Stalls(tmp_path, ["trainer-0", "trainer-1"], 20.0)
    began = time.monotonic()
    with pytest.raises(ProcessDied) as raised:
        Supervisor([spec(0), spec(1)], tmp_path, run_id, 1.0, stalls=stalls).run(stop_one)
    assert time.monotonic() - began < 120.0
    text = str(raised.value)
    assert text.startswith("trainer-1 makes no progress: its last report is 'step 3, training, micro-batch 2 of 8'")
    assert (
        f"trainer-1: {'stopped by a signal' if stopped else 'sleeping'}; step 3, training, micro-batch 2 of 8" in text
    )
    assert "trainer-0: " in text
    log = (tmp_path / "logs" / "trainer-1.log").read_text()
    if py_spy:
        other = r"trainer-0: (sleeping|running); step 3, training, micro-batch 2 of 8, for \d+ s; in "
        assert re.search(other, text)  # it may be seen at either
        assert stopped or "in waits_for_ever (<string>:9)" in text
    else:
        assert "py-spy is not installed" in stack_file(tmp_path / "logs", "trainer-1").read_text()
        assert stopped or "in waits_for_ever" in log
    assert carrying(f"ASYNCRL_RUN_ID={run_id}".encode()) == []


def test_stalled_restartable_process_is_killed(tmp_path: Path) -> None:
    run_id = secrets.token_hex(8)
    (tmp_path / "logs").mkdir()
    (tmp_path / READY).touch()
    env = {"ASYNCRL_RUN_ID": run_id, "NAME": "episodes-0", "EVERY": "0.05"}
    code = RANK.replace('os.environ["HANGS"] == "yes"', 'not os.environ["ASYNCRL_INCARNATION"]')
    code = code.replace('float(os.environ["PATIENCE"])', '60.0 if os.environ["ASYNCRL_INCARNATION"] else 1.5')
    hangs = ProcessSpec("episodes-0", [sys.executable, "-c", code, str(tmp_path)], env, restarts=1, reports=True)
    log = str(tmp_path / "logs" / "episodes-0.log")
    waits = f"import time\nwhile open({log!r}).read().count('up') < 2: time.sleep(0.1)\ntime.sleep(2)"
    trainer = ProcessSpec("trainer-0", [sys.executable, "-c", waits], env, ends_the_run=True)
    stalls = Stalls(tmp_path, ["episodes-0"], 20.0)
    Supervisor([hangs, trainer], tmp_path, run_id, 1.0, stalls=stalls).run(lambda: None)
    assert "waits_for_ever" in stack_file(tmp_path / "logs", "episodes-0").read_text()
