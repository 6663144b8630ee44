"""Dead engines and routers are started again: when, how often, and what happens before."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.engine.registry import Registry
from asyncrl.errors import EngineError, Paused, ProcessDied, WeightsError, is_of_user
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.processes import Supervisor
from asyncrl.launch.restarts import RestartPolicy, restart_policy
from asyncrl.network.addresses import LOST, READY, Addresses
from asyncrl.progress import begin_file, end_file, failing, failures
from tests.launch.checks.worlds import ENGINE, ROUTER

TRAINER = ProcessSpec("trainer-0", [], {}, ends_the_run=True, recovers=True)


class Router:
    def __init__(self) -> None:
        self.alive = True
        self.forgotten: list[str] = []

    def forget(self, url: str) -> None:
        if not self.alive:
            raise EngineError("the router does not answer")
        self.forgotten.append(url)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / READY).touch()
    return tmp_path


def note(run_dir: Path, url: str, incarnation: str, end: str = "\n") -> None:
    with (run_dir / LOST).open("a") as file:
        file.write(json.dumps({"engine": url, "incarnation": incarnation, "reason": "hangs"}) + end)


def test_process_dying_before_all_are_up_is_not_restarted(tmp_path: Path) -> None:
    policy = RestartPolicy(tmp_path)
    assert not policy.allows(ENGINE)
    (tmp_path / READY).touch()
    assert policy.allows(ENGINE)
    assert policy.allows(ROUTER)
    assert not policy.allows(TRAINER)


def test_restarts_are_told_with_the_time_of_the_death(run_dir: Path) -> None:
    told: list[tuple[str, str, float]] = []
    policy = restart_policy(
        run_dir,
        Addresses("run0", "", run_dir, (), "", "", 0, 0.0),
        [],
        lambda node: True,
        restarted=lambda *restart: told.append(restart),
    )
    assert policy.may_start_now(ROUTER, "killed")
    ((name, how, died),) = told
    assert (name, how) == ("router", "killed")
    assert 0 <= time.time() - died < 60


def test_restarts_are_bounded(run_dir: Path) -> None:
    policy = RestartPolicy(run_dir)
    for count in (1, 2):
        assert policy.allows(ENGINE)
        assert policy.may_start_now(ENGINE, "killed")
        assert policy.count("engine-0") == count
    assert not policy.allows(ENGINE)
    assert policy.allows(ROUTER)


def test_an_engine_starts_only_once_the_router_has_forgotten_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = Router()
    policy = RestartPolicy(run_dir, router.forget)
    router.alive = False
    assert not policy.may_start_now(ENGINE, "killed by SIGKILL")
    assert policy.may_start_now(ROUTER, "killed by SIGKILL")  # needs nobody
    assert not policy.may_start_now(ENGINE, "killed by SIGKILL")
    router.alive = True
    assert policy.may_start_now(ENGINE, "killed by SIGKILL")
    assert router.forgotten == ["http://e0"]
    assert policy.count("engine-0") == 1
    assert capsys.readouterr().err.count("engine-0 died (killed by SIGKILL)") == 1  # told once
    assert policy.may_start_now(ENGINE, "killed by SIGSEGV")
    assert "engine-0 died (killed by SIGSEGV)" in capsys.readouterr().err  # and so is the next death


def test_engine_given_up_is_killed_once_per_incarnation(run_dir: Path) -> None:
    policy = RestartPolicy(run_dir)
    assert policy.given_up([ENGINE, ROUTER]) == []
    note(run_dir, "http://elsewhere", "")
    note(run_dir, "http://e0", "", end="")  # half a line: its writer is not done
    assert policy.given_up([ENGINE]) == []
    with (run_dir / LOST).open("a") as file:
        file.write("\n")
    assert policy.given_up([ENGINE]) == ["engine-0"]
    assert policy.given_up([ENGINE]) == []
    assert policy.may_start_now(ENGINE, "killed")
    note(run_dir, "http://e0", "")  # the trainer notices only now that the first one died
    assert policy.given_up([ENGINE]) == []
    note(run_dir, "http://e0", "restart-1")
    assert policy.given_up([ENGINE]) == ["engine-0"]


def test_engine_whose_death_ends_the_run_is_not_killed(run_dir: Path) -> None:
    policy = RestartPolicy(run_dir)
    note(run_dir, "http://e0", "")
    assert policy.given_up([replace(ENGINE, restarts=0)]) == []


class Silent:
    """A process that does not answer, until it is started anew."""

    def __init__(self) -> None:
        self.silent = True

    def hangs(self) -> bool:
        return self.silent

    def forget(self) -> None:
        self.silent = False


def test_silent_one_is_named_once_the_run_is_under_way(tmp_path: Path) -> None:
    watches: Any = {"engine-0": Silent(), "router": Silent()}
    watches["router"].silent = False
    policy = RestartPolicy(tmp_path, watches=watches)
    assert policy.hanging() == []  # while a run starts, they may take their time
    (tmp_path / READY).touch()
    assert policy.hanging() == ["engine-0"]
    assert policy.hanging() == []
    watches["engine-0"].silent = True
    assert policy.may_start_now(ENGINE, "killed by SIGSEGV")  # by itself
    assert policy.hanging() == []  # the new one is given its own time


STEP = ProcessSpec("engine-1", [], {}, restarts=2, url="http://e1", node="node2", step=True)


def test_silent_machine_costs_no_restart_and_is_reasked(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [100.0], list[str]()
    monkeypatch.setattr("asyncrl.launch.restarts.time.monotonic", lambda: now[0])
    policy = RestartPolicy(run_dir, has_machine=lambda node: bool(asked.append(node)) or len(asked) < 3)
    begun = begin_file(run_dir, STEP.name)
    begun.parent.mkdir(parents=True)
    begun.touch()
    ended = end_file(run_dir, STEP.name)
    ended.touch()
    assert not policy.lost(STEP)  # it had begun: it died by itself, and the cluster is not asked
    assert policy.may_start_now(STEP, "exit code 1")
    assert not ended.exists()  # it tells of an end that is over
    assert (policy.count(STEP.name), asked) == (1, [])
    for _ in range(5):  # srun ends at once, and nothing has begun
        assert not policy.lost(STEP)
        assert not policy.may_start_now(STEP, "exit code 1")
    for times in (1, 2):
        now[0] += 10
        assert not policy.lost(STEP)
        assert policy.may_start_now(STEP, "exit code 1")
        assert (policy.count(STEP.name), len(asked)) == (1, times)
    now[0] += 10
    assert policy.lost(STEP)


def test_vital_engine_is_not_given_up_with_its_machine(run_dir: Path) -> None:
    policy = RestartPolicy(run_dir, has_machine=lambda node: False)
    assert policy.lost(STEP)
    assert not policy.lost(replace(STEP, restarts=0))  # cluster.on_engine_death=fail


def test_asked_engine_may_stop_once_let_go(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("asyncrl.launch.restarts.time.monotonic", lambda: now[0])
    policy, registry = RestartPolicy(run_dir, leave_seconds=60.0), Registry(run_dir)
    registry.clear()

    def may_stop() -> list[str]:
        now[0] += 2
        return policy.may_stop([ENGINE, ROUTER, STEP])

    assert may_stop() == []
    registry.ask_to_leave(ENGINE.url)
    registry.ask_to_leave("http://elsewhere")
    assert may_stop() == []
    assert policy.leaves(ENGINE)
    assert not policy.leaves(STEP)
    registry.let_go(ENGINE.url)
    assert may_stop() == [ENGINE.name]
    policy.stopped(ENGINE)
    assert registry.leaving() == {"http://elsewhere"}
    registry.ask_to_leave(STEP.url)
    assert may_stop() == []
    now[0] += 60  # the trainer is dead, or in a step that takes longer than anybody waits
    assert may_stop() == [STEP.name]


def test_engines_that_come_to_a_run_say_so_in_every_life(run_dir: Path) -> None:
    note(run_dir, "http://e0", "restart-w-0")  # of another that had this address
    policy = RestartPolicy(run_dir, newcomers="w-")
    assert policy.incarnation("engine-0") == "restart-w-0"
    assert policy.given_up([ENGINE]) == []
    note(run_dir, "http://e0", "restart-w-0")
    assert policy.given_up([ENGINE]) == ["engine-0"]
    assert policy.may_start_now(ENGINE, "killed")
    assert policy.incarnation("engine-0") == "restart-w-1"


RANKS = [replace(TRAINER, name=f"trainer-{rank}", restarts=9, together="trainers") for rank in range(2)]


def trained(run_dir: Path, steps: int) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"version": n + 1}) + "\n" for n in range(steps)))


def die(policy: RestartPolicy) -> None:
    """All ranks die of one death, and start again."""
    for rank in RANKS:
        assert policy.allows(rank)
        assert policy.may_start_now(rank, "killed by SIGKILL")


def test_trainers_recover_twice_at_a_step_and_thrice_in_ten(run_dir: Path) -> None:
    policy = RestartPolicy(run_dir)
    trained(run_dir, 5)
    die(policy)
    die(policy)
    assert not policy.allows(RANKS[0])  # a third death at this step would be followed by a fourth
    trained(run_dir, 9)
    die(policy)
    trained(run_dir, 14)
    assert not policy.allows(RANKS[1])
    trained(run_dir, 15)  # ten steps after the first two
    die(policy)
    assert policy.recoveries() == [
        f"had recovered after step {step}: trainer-0, killed by SIGKILL" for step in (5, 5, 9, 15)
    ]


def test_ranks_share_the_number_of_starts(run_dir: Path) -> None:
    """Otherwise the one behind would be taken, when it has ended well, for one that others wait for."""
    policy = RestartPolicy(run_dir)
    for rank in (RANKS[1], RANKS[1], RANKS[0]):  # on a GPU a process may take seconds to die
        assert policy.allows(rank)
        assert policy.may_start_now(rank, "killed by SIGKILL")
    assert [policy.count(rank.name) for rank in RANKS] == [2, 2]
    assert len(policy.recoveries()) == 2


@pytest.mark.parametrize("lasting", [False, True])
def test_recurring_errors_of_trainers_end_the_run(lasting: bool, run_dir: Path) -> None:
    (run_dir / "progress").mkdir()
    told = {
        "process": "trainer-1",
        "time": 1.0,
        "error": "ValueError: mine",
        "place": "",
        "lasting": lasting,
        "memory": False,
    }
    (run_dir / "progress/trainer-1.failure").write_text(json.dumps(told))
    assert all(RestartPolicy(run_dir).allows(rank) is not lasting for rank in RANKS)


def test_trainers_out_of_memory_go_on_four_times(run_dir: Path) -> None:
    (run_dir / "progress").mkdir()
    error = {"process": "trainer-1", "time": 1.0, "error": "", "place": "", "lasting": False, "memory": True}
    for _ in range(2):  # it is counted over the launchers of a run
        policy = RestartPolicy(run_dir)
        for _ in range(2):
            (run_dir / "progress/trainer-1.failure").write_text(json.dumps(error))
            die(policy)
    assert not policy.allows(RANKS[0])


def test_error_of_one_death_is_not_taken_for_that_of_the_next(run_dir: Path) -> None:
    (run_dir / "progress").mkdir()
    error = {"process": "trainer-1", "time": 1.0, "error": "", "place": "", "lasting": False, "memory": True}
    (run_dir / "progress/trainer-1.failure").write_text(json.dumps(error))
    policy = RestartPolicy(run_dir)
    die(policy)
    die(policy)
    assert (run_dir / "out_of_memory").read_text() == "1"


def test_error_of_ours_or_of_the_users_code_lasts(run_dir: Path) -> None:
    with pytest.raises(WeightsError), failing(run_dir, "trainer-0"):
        raise WeightsError("two tensors differ")
    with pytest.raises(ValueError, match="mine"), failing(run_dir, "trainer-1"):
        raise ValueError("mine")  # this file is no part of asyncrl
    assert [one["lasting"] for one in failures(run_dir)] == [True, True]
    with pytest.raises(RuntimeError), failing(run_dir, "trainer-2"):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert (failures(run_dir)[-1]["lasting"], failures(run_dir)[-1]["memory"]) == (False, True)
    assert not is_of_user("")
    assert not is_of_user("/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3252, in all_reduce")


def test_death_of_all_trainers_is_no_end_of_the_run(tmp_path: Path) -> None:
    """Both are gone before the supervisor looks, and start again; then both end well."""
    (tmp_path / READY).touch()
    (tmp_path / "logs").mkdir()
    once = f"import pathlib, os, sys; seen = pathlib.Path({str(tmp_path)!r}, 'seen-' + sys.argv[1]); "
    once += "seen.exists() or (seen.touch(), os.kill(os.getpid(), 9))"
    ranks = [replace(rank, argv=[sys.executable, "-c", once, rank.name]) for rank in RANKS]
    Supervisor(ranks, tmp_path, "run0", 5.0, RestartPolicy(tmp_path)).run(lambda: None)
    assert {file.name for file in tmp_path.glob("seen-*")} == {"seen-trainer-0", "seen-trainer-1"}


def test_finished_rank_restarts_with_one_dying_at_its_end(tmp_path: Path) -> None:
    """Otherwise the other would wait for it in vain."""
    (tmp_path / READY).touch()
    (tmp_path / "logs").mkdir()
    lives = """
import os, pathlib, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
life = f"{name}-{os.environ['ASYNCRL_INCARNATION']}"
(folder / f"seen-{life}").touch()
if life == "trainer-1-":
    while not (folder / "ended").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
deadline = time.monotonic() + 20
while life == "trainer-1-restart-1" and not (folder / "seen-trainer-0-restart-1").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""
    ranks = [replace(rank, argv=[sys.executable, "-c", lives, str(tmp_path), rank.name], restarts=1) for rank in RANKS]
    supervisor = Supervisor(ranks, tmp_path, "run0", 5.0, RestartPolicy(tmp_path))

    def note_the_end() -> None:
        if supervisor._children["trainer-0"].poll() == 0:
            (tmp_path / "ended").touch()

    supervisor.run(note_the_end)
    assert sorted(file.name for file in tmp_path.glob("seen-*")) == [
        f"seen-trainer-{rank}-{life}" for rank in range(2) for life in ("", "restart-1")
    ]


def test_rank_dying_behind_the_last_checkpoint_is_left(
    run_dir: Path,
) -> None:
    """It would train on, because nobody asks it to stop any more."""
    (run_dir / "logs").mkdir()
    lives = """
import os, pathlib, sys, time
run_dir, name = pathlib.Path(sys.argv[1]), sys.argv[2]
assert not os.environ["ASYNCRL_INCARNATION"]
if name == "trainer-0":
    (run_dir / "stopped").touch()
    time.sleep(60)  # at the last barrier
while not (run_dir / "stopped").exists():
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""
    ranks = [replace(rank, argv=[sys.executable, "-c", lives, str(run_dir), rank.name]) for rank in RANKS]
    policy = RestartPolicy(run_dir)
    with pytest.raises(Paused, match="ended as requested"):
        Supervisor(ranks, run_dir, "run0", 5.0, policy).run(lambda: None)
    assert not policy.recoveries()


def test_death_too_many_ends_the_run_with_the_reasons_of_all(run_dir: Path) -> None:
    (run_dir / "logs").mkdir()
    trained(run_dir, 5)
    ranks = [replace(rank, argv=[sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) for rank in RANKS]
    with pytest.raises(ProcessDied) as raised:
        Supervisor(ranks, run_dir, "run0", 5.0, RestartPolicy(run_dir)).run(lambda: None)
    assert len(re.findall(r"had recovered after step 5: trainer-., killed by SIGKILL", str(raised.value))) == 2
    assert re.search(r"trainer-. had been restarted 2 times", str(raised.value))


ROLLOUT = ProcessSpec("rollout", [], {}, restarts=9, recovers=True)


def test_deaths_of_both_sides_are_counted_apart(run_dir: Path) -> None:
    policy = RestartPolicy(run_dir)
    trained(run_dir, 5)
    for _ in range(2):
        die(policy)
        assert policy.allows(ROLLOUT)
        assert policy.may_start_now(ROLLOUT, "killed by SIGKILL")
    assert not policy.allows(ROLLOUT)
    assert not policy.allows(RANKS[0])
    assert [line.split(": ")[1] for line in policy.recoveries()].count("rollout, killed by SIGKILL") == 2


@pytest.mark.parametrize("lasting", [False, True])
def test_rollout_process_goes_on_unless_it_would_recur(lasting: bool, run_dir: Path) -> None:
    """Nor is its memory that of the trainers."""
    (run_dir / "progress").mkdir()
    error = {"process": "rollout", "time": 1.0, "error": "", "place": "", "lasting": lasting, "memory": not lasting}
    (run_dir / "progress/rollout.failure").write_text(json.dumps(error))
    policy = RestartPolicy(run_dir)
    assert policy.allows(ROLLOUT) is not lasting
    assert all(policy.allows(rank) for rank in RANKS)
    policy.may_start_now(ROLLOUT, "exit code 1")
    assert not (run_dir / "out_of_memory").exists()
