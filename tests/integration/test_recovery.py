"""Trainers that die start again from a checkpoint, train the batches since then once more, and go on, while engines and
rollouts work; a rollout process that dies is replaced by one that goes on from its last state. The recording proves
that nothing shows: trained again without any death, it gives the same losses, gradients and weights bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from asyncrl.network.addresses import TRAINING
from tests.integration.books import check_books, check_replay
from tests.integration.running import (
    RUN,
    finish,
    lines,
    output,
    processes_of,
    start,
    wait_for_step,
    wait_until,
)

pytestmark = pytest.mark.integration

EVERY = 4
RECOVERS = [one for one in RUN if not one.startswith(("checkpoint", "cluster"))]
RECOVERS += [f"checkpoint.every={EVERY}", "cluster.on_death=recover"]
"""Settings of a run whose trainers start again."""


def signal_tree(leader: int, number: int) -> None:
    for member in [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]:
        member.send_signal(number)


def kill_within_a_publish(run: subprocess.Popen[str], run_dir: Path, victim: str) -> None:
    """Kill a trainer that waits for an engine to be paused."""
    engine = processes_of(run, run_dir)["engine-0"]
    signal_tree(engine, signal.SIGSTOP)
    doing = run_dir / "progress/trainer-0.lease"
    wait_until(lambda: "publishing weights" in doing.read_text(), run, run_dir, "a publish that waits for the engine")
    os.kill(processes_of(run, run_dir)[victim], signal.SIGKILL)
    signal_tree(engine, signal.SIGCONT)


def told(run_dir: Path) -> list[str]:
    found = [line["warning"] for line in lines(run_dir / "warnings.jsonl")]
    return [warning for warning in found if warning.startswith("the trainers go on after ")]


def test_trainers_that_die_twice_go_on_with_the_same_weights(tmp_path: Path) -> None:
    """One rank dies in a step, and the other, later, in the middle of an update of the engines."""
    run_dir, layout = tmp_path / "run", ["trainer.data_parallel=2"]
    with start(run_dir, *RECOVERS, *layout) as run:
        wait_for_step(run, run_dir, EVERY + 2)
        before = processes_of(run, run_dir)
        os.kill(before["trainer-1"], signal.SIGKILL)
        wait_until(lambda: len(told(run_dir)) == 1, run, run_dir, "the trainers went on")
        wait_for_step(run, run_dir, len(lines(run_dir / "metrics.jsonl")) + 1)
        kill_within_a_publish(run, run_dir, "trainer-0")
        wait_until(lambda: len(told(run_dir)) == 2, run, run_dir, "the trainers went on again")
        after = processes_of(run, run_dir)
        code, text = finish(run, run_dir)
    assert code == 0, text
    first, second = told(run_dir)
    assert "the weights are the same" in first
    assert "the weights were not compared" in second  # the engine may have had a part of the next version
    assert "trainer-1 died (killed by SIGKILL" in text
    assert "trainer-0 died (killed by SIGKILL" in text
    assert all(before[name] == after[name] for name in ("engine-0", "router", "rollout"))
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *layout)


def goes_on(run_dir: Path, settings: Sequence[str], strike: Callable[[subprocess.Popen[str]], None]) -> str:
    """Strike the rollout process of a run that goes on to its end, with the same router and trainers. Return what it
    printed."""
    with start(run_dir, *RECOVERS, *settings) as run:
        wait_for_step(run, run_dir, EVERY + 1)
        before = processes_of(run, run_dir)
        strike(run)
        wait_until(lambda: bool(restarted(run_dir)), run, run_dir, "the rollout process went on")
        after = processes_of(run, run_dir)
        code, text = finish(run, run_dir)
    assert code == 0, text
    same = {"trainer-0", "router"} & after.keys()  # both may have ended with the run
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
    assert json.loads((run_dir / "summary.json").read_text())["recoveries"] == 1
    return text


def restarted(run_dir: Path) -> list[str]:
    found = [line["warning"] for line in lines(run_dir / "warnings.jsonl")]
    return [warning for warning in found if warning.startswith("the rollout process goes on after ")]


def test_killed_rollout_process_goes_on_from_its_state(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def strike(run: subprocess.Popen[str]) -> None:
        os.kill(processes_of(run, run_dir)["rollout"], signal.SIGKILL)

    text = goes_on(run_dir, [], strike)
    assert "rollout died (killed by SIGKILL" in text
    assert text.count(" died (") == 1
    check_books(run_dir)
    check_replay(run_dir, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [[], ["processes.count=2"], ["trainer.lora.rank=4", "weights.lora=versions"]],
    ids=["one", "several", "adapters"],
)
def test_rollout_process_that_dies_within_a_publish_goes_on(settings: list[str], tmp_path: Path) -> None:
    """The engine is stopped meanwhile, so that the publish waits for it."""
    run_dir = tmp_path / "run"

    def strike(run: subprocess.Popen[str]) -> None:
        engine, doing = processes_of(run, run_dir)["engine-0"], run_dir / "progress/trainer-0.lease"
        signal_tree(engine, signal.SIGSTOP)
        wait_until(lambda: "publishing weights" in doing.read_text(), run, run_dir, "a publish that waits")
        os.kill(processes_of(run, run_dir)["rollout"], signal.SIGKILL)
        wait_until(lambda: "rollout died" in output(run_dir), run, run_dir, "the launcher has seen it")
        signal_tree(engine, signal.SIGCONT)

    goes_on(run_dir, settings, strike)
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *(one for one in settings if one.startswith("trainer")))


@pytest.mark.nightly
def test_rollout_process_dying_while_awaited_goes_on(tmp_path: Path) -> None:
    """It nearly always waits, because one group is played at a time."""
    run_dir = tmp_path / "run"

    def strike(run: subprocess.Popen[str]) -> None:
        os.kill(processes_of(run, run_dir)["rollout"], signal.SIGKILL)

    goes_on(run_dir, ["rollout.max_running_groups=1"], strike)
    check_books(run_dir)
    check_replay(run_dir, tmp_path)


@pytest.mark.nightly
def test_rollout_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def strike(run: subprocess.Popen[str]) -> None:
        os.kill(processes_of(run, run_dir)["rollout"], signal.SIGSTOP)

    text = goes_on(run_dir, ["cluster.stall_timeout=10"], strike)
    assert "rollout makes no progress" in text
    check_books(run_dir)
    check_replay(run_dir, tmp_path)


@pytest.mark.nightly
def test_rollout_process_dying_of_user_code_ends_the_run(tmp_path: Path) -> None:
    """It would only happen again."""
    run_dir = tmp_path / "run"
    (tmp_path / "mine.py").write_text("def picky(group):\n    return False\n")
    settings = ["rollout.accept=mine:picky", "rollout.max_rejections=20", "eval.questions=0", "resume=null"]
    with start(run_dir, *RECOVERS, *settings) as run:
        code, text = finish(run, run_dir)
    assert code == 1, text
    assert "rollout.accept rejected 20 groups in a row" in text
    assert not restarted(run_dir)


LAYOUTS = [
    ["trainer.data_parallel=2", "trainer.lora.rank=4", "weights.lora=versions"],
    ["trainer.tensor_parallel=2", "weights.transport=distributed"],
    ["trainer.pipeline_parallel=2", "weights.transport=disk"],
    ["trainer.pipeline_parallel=2", "weights.overlap=true", "weights.transport=distributed", "trainer.batch_parts=2"],
]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(one.partition("=")[2] for one in layout))
def test_trainers_of_any_layout_and_transport_recover(layout: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(run_dir, *RECOVERS, *layout) as run:
        wait_for_step(run, run_dir, EVERY + 1)
        os.kill(processes_of(run, run_dir)["trainer-1"], signal.SIGKILL)
        code, text = finish(run, run_dir)
    assert code == 0, text
    assert len(told(run_dir)) == 1
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *layout)


SHAPE = ["rollout.max_staleness=1", "rollout.lead=null"]
TURNS = ["cluster.placement=colocated", "weights.pause_mode=retract", "weights.staging=stream"]


def kill_when(
    whose_turn: Callable[[], bool], run: subprocess.Popen[str], run_dir: Path, name: str = "trainer-0"
) -> None:
    """Kill a process while this is so, a step after the last death: a third one at the same step ends the run."""
    wait_for_step(run, run_dir, len(lines(run_dir / "metrics.jsonl")) + 1)
    victim, dead = processes_of(run, run_dir)[name], False
    while not dead:
        while not whose_turn():
            assert run.poll() is None, output(run_dir)
        os.kill(victim, signal.SIGSTOP)
        dead = whose_turn()
        os.kill(victim, signal.SIGKILL if dead else signal.SIGCONT)


@pytest.mark.nightly
def test_trainers_in_turns_recover_in_either_turn(tmp_path: Path) -> None:
    """The engine has released its memory, or generates; in the trainers' turn it dies as well."""
    run_dir, turn = tmp_path / "run", tmp_path / "run" / TRAINING
    with start(run_dir, *RECOVERS, *SHAPE, *TURNS) as run:
        wait_for_step(run, run_dir, EVERY + 1)
        kill_when(lambda: not turn.exists(), run, run_dir)
        wait_until(lambda: len(told(run_dir)) == 1, run, run_dir, "the trainers went on")
        engine = processes_of(run, run_dir)["engine-0"]
        kill_when(turn.exists, run, run_dir)
        wait_until(lambda: len(told(run_dir)) == 2, run, run_dir, "the trainers went on again")
        same = processes_of(run, run_dir)["engine-0"] == engine
        kill_when(turn.exists, run, run_dir)
        os.killpg(engine, signal.SIGKILL)
        wait_until(lambda: len(told(run_dir)) == 3, run, run_dir, "the trainers and the engine went on")
        code, text = finish(run, run_dir)
    assert code == 0, text
    assert same
    assert "engine-0 died" in text
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *SHAPE)


@pytest.mark.nightly
def test_colocated_rollout_process_recovers_in_either_turn(tmp_path: Path) -> None:
    """The engine generates, or has released its memory."""
    run_dir, turn = tmp_path / "run", tmp_path / "run" / TRAINING
    with start(run_dir, *RECOVERS, *SHAPE, *TURNS) as run:
        wait_for_step(run, run_dir, EVERY + 1)
        before = processes_of(run, run_dir)
        kill_when(lambda: not turn.exists(), run, run_dir, "rollout")
        wait_until(lambda: len(restarted(run_dir)) == 1, run, run_dir, "the rollout process went on")
        kill_when(turn.exists, run, run_dir, "rollout")
        wait_until(lambda: len(restarted(run_dir)) == 2, run, run_dir, "the rollout process went on again")
        after = processes_of(run, run_dir)
        code, text = finish(run, run_dir)
    assert code == 0, text
    assert all(before[name] == after[name] for name in ("engine-0", "trainer-0"))
    check_books(run_dir)
    check_replay(run_dir, tmp_path, *SHAPE)


LOSS = """
from pathlib import Path

def greedy(logprobs, rows):
    if not Path("run/out_of_memory").exists() or Path("run/out_of_memory").read_text() == "1":
        raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
    return -rows.advantages * logprobs
"""


def test_trainers_out_of_memory_halve_their_micro_batches(tmp_path: Path) -> None:
    """A loss has no memory before the second recovery, the first with smaller ones."""
    (tmp_path / "mine.py").write_text(LOSS)
    run_dir, sizes = tmp_path / "run", ["trainer.micro_batch_tokens=192", "run.max_steps=6"]
    with start(run_dir, *RECOVERS, *sizes, "algo.loss=mine:greedy", "eval.questions=0", "resume=null") as run:
        code, text = finish(run, run_dir)
    assert code == 0, text
    found = [line["warning"] for line in lines(run_dir / "warnings.jsonl")]
    assert "out of memory 2 times: trainer.micro_batch_tokens=96 instead of 192" in found
    assert json.loads((run_dir / "summary.json").read_text())["recoveries"] == 2
    assert [step["version"] for step in lines(run_dir / "metrics.jsonl")] == list(range(1, 7))


DIES = """
import os
import signal

from torch.optim.optimizer import register_optimizer_step_pre_hook

from asyncrl.extension import Extension, TrainerHooks

MOMENTS = {5: "batch", 9: "forward", 13: "backward", 17: "optimizer", 21: "gather", 25: "update", 27: "checkpoint"}


class Gathered:
    def __init__(self, weights, dies):
        self._weights, self._dies = weights, dies

    def __getattr__(self, name):
        return getattr(self._weights, name)

    def stream(self, **options):
        for number, one in enumerate(self._weights.stream(**options)):
            if number == 2:
                self._dies("gather")
            yield one


class Hooks(TrainerHooks):
    def __init__(self):
        self.version = 0
        register_optimizer_step_pre_hook(lambda *_: self.dies("optimizer"))

    def dies(self, moment):
        if MOMENTS.get(self.version) != moment:
            return
        try:
            os.close(os.open(f"died-{moment}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def before_update(self, batch):
        self.version = batch.version
        self.dies("batch")
        return ()

    def loss(self, losses, logprobs, rows):
        self.dies("forward")
        if logprobs.requires_grad:
            logprobs.register_hook(lambda _: self.dies("backward"))
        return losses

    def after_update(self, version):
        self.dies("update")
        return {}

    def sent(self, weights):
        return Gathered(weights, self.dies)

    def state(self):
        self.dies("checkpoint")
        return None


class Dies(Extension):
    def trainer(self, policy):
        return Hooks()
"""
"""An extension by which a rank dies once at each moment of a step; in a checkpoint after every fourth one."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [[], ["trainer.tensor_parallel=2", "trainer.pipeline_parallel=2"]],
    ids=["one rank", "tp2-pp2"],
)
def test_rank_dying_at_any_moment_of_a_step_does_not_show(layout: list[str], tmp_path: Path) -> None:
    """At most three deaths come within ten steps: a fourth would end the run."""
    run_dir, steps = tmp_path / "run", 30
    (tmp_path / "planted.py").write_text(DIES)
    settings = [*layout, f"run.max_steps={steps}", "+extensions.planted=planted:Dies", "cluster.max_restarts=100"]
    with start(run_dir, *RECOVERS, *settings) as run:
        code, text = finish(run, run_dir)
    assert code == 0, text
    died = sorted(file.name.removeprefix("died-") for file in tmp_path.glob("died-*"))
    assert died == ["backward", "batch", "checkpoint", "forward", "gather", "optimizer", "update"]
    assert json.loads((run_dir / "summary.json").read_text())["recoveries"] == len(died)
    print("\n".join(told(run_dir)))
    check_books(run_dir, steps)
    check_replay(run_dir, tmp_path, f"run.max_steps={steps}", *layout)
