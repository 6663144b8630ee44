"""The run continues if a user's agent or reward, the router, or an engine between two publishes hangs or raises.

If a trainer rank or the rollout process hangs, the run ends and reports what each process was doing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.view.watch.advice import advise
from asyncrl.extensions.view.watch.runs import RunFolder
from asyncrl.extensions.view.watch.server import evidence
from asyncrl.launch.stalls import stack_file
from tests.integration.books import balanced
from tests.integration.running import (
    descendants,
    finish,
    lines,
    nothing_is_left,
    output,
    processes_of,
    serving,
    start,
    wait_for_step,
    wait_until,
)
from tests.integration.stub_trainer import BATCHES
from tests.integration.workload import Workload

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
STUBS = "tests.integration.stub_run"
"""Command with stub engines and a stub trainer, for what concerns the launcher and the rollout process alone."""


@pytest.fixture
def stub_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run with stubs find its workload, and modules in the test's folder."""
    lengths = asdict(Lengths(mean=4.0, sigma=0.3, longest=8, group_size=16))
    for name, value in Workload(lengths, per_token=0.005, start_after=[0.0], train_seconds=0.1).environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))


USERS = '''
import asyncio, time

class Agent:
    """Hangs where the question begins with 1 or 2."""

    async def run(self, prompt, generate):
        from asyncrl.schema import Trajectory, Turn
        first = await generate(prompt.token_ids)
        if prompt.question["prompt"][0] in "12":
            await asyncio.Event().wait()
        return Trajectory([Turn([], first)])

def score(answer, row):
    """Raises where the question ends with 3 or 4, hangs where it ends with 5."""
    if row["prompt"][-1] in "34":
        raise KeyError("no reference")
    if row["prompt"][-1] == "5":
        time.sleep(600)
    return float(answer[:1] == row["prompt"][0])
'''


@pytest.mark.usefixtures("stub_workload")
def test_hanging_agent_and_bad_reward_cost_their_groups(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "questions.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{number:03}", "answer": f"{number:03}"}) + "\n" for number in range(1000))
    )
    run_dir = tmp_path / "run"
    settings = [
        *("task=file", f"task.train_file={tmp_path / 'questions.jsonl'}", "task.reward=users:score"),
        *("agent=users:Agent", "rollout.agent_timeout=1.0", "rollout.reward_timeout=1.0"),
        *("rollout.batch_groups=4", "rollout.group_size=2", "run.max_steps=5", "eval.questions=0"),
        *("weights.verify=false", "cluster.tls=false"),
    ]
    with start(run_dir, *settings, module=STUBS) as process:
        code, text = finish(process, run_dir)
    assert code == 0, text
    ledger = balanced(run_dir)
    rejected = Counter(ledger.groups.rejected)
    assert rejected.keys() == {"agent_timeout", "reward_error", "reward_timeout"}
    assert ledger.groups.trained == 5 * 4
    assert ledger.trajectories.trained == 5 * 8
    assert ledger.events.requeued <= rejected.total()
    told = lines(run_dir / "warnings.jsonl")
    assert {line["warning"].split(": ")[1] for line in told} == rejected.keys()
    assert all(line["warning"].startswith("g000000") for line in told)  # uid
    (trace, *_) = (line["traceback"] for line in told if "traceback" in line)
    assert trace.endswith("KeyError: 'no reference'\n")
    nothing_is_left(run_dir)


@pytest.mark.usefixtures("stub_workload")
def test_dead_run_tells_the_page_why_until_restarted(tmp_path: Path) -> None:
    """The reward raises until it is mended. The page reads what the launcher left."""
    reward, run_dir = tmp_path / "users.py", tmp_path / "run"
    reward.write_text("def score(answer, row):\n    return {}[0]\n")
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 50)
    settings = [
        *("task=file", f"task.train_file={tmp_path / 'questions.jsonl'}", "task.reward=users:score"),
        *("rollout.batch_groups=2", "rollout.group_size=2", "rollout.max_failures=2", "run.max_steps=2"),
        *("eval.questions=0", "weights.verify=false", "cluster.tls=false", "resume=auto"),
    ]
    with start(run_dir, *settings, module=STUBS) as process:
        code, text = finish(process, run_dir)
    assert code == 1, text
    page = RunFolder(tmp_path)
    assert page.run("run").summary()["state"] == "died"
    first = advise(evidence(page.run("run")))[0]
    assert first.rule == "died"
    assert any("KeyError: 0" in line and f"{reward}:2, in score" in line for line in first.lines), first.lines
    named = json.loads((run_dir / "overrides.json").read_text())["names"]
    assert {"task=file", "task.reward", "run.max_steps", "resume"} <= set(named)
    reward.write_text("def score(answer, row):\n    return float(len(answer) % 2)\n")
    shutil.rmtree(run_dir / BATCHES, ignore_errors=True)  # of the stub trainer, if it had begun
    with start(run_dir, *settings, module=STUBS) as process:
        code, text = finish(process, run_dir)
    assert code == 0, text
    assert page.run("run").summary()["state"] == "ended"
    assert not (run_dir / "end.json").exists()


@pytest.mark.campaign  # test_rollout_faults.py stops and kills both over stubs, test_weight_faults.py real engines
def test_router_and_engine_are_replaced_while_trainers_wait(tmp_path: Path) -> None:
    """The run is synchronous, so that no publish finds the stopped engine. At the end SIGTERM stops everything."""
    run_dir = tmp_path / "run"
    overrides = ["run.max_steps=100000", "eval.questions=0", "engine.count=2", "weights.timeout=10"]
    with start(run_dir, *overrides, "rollout.max_staleness=0") as process:
        wait_for_step(process, run_dir, 2)
        running = processes_of(process, run_dir)
        for stopped in ("engine-1", "router"):
            leader = psutil.Process(running[stopped])
            for member in [leader, *leader.children(recursive=True)]:
                member.send_signal(signal.SIGSTOP)
        stopped_at = len(lines(run_dir / "metrics.jsonl"))
        wait_for_step(process, run_dir, stopped_at + 5, timeout=60)
        text = output(run_dir)
        assert "router is running but does not answer; killing it" in text
        wait_until(lambda: serving(run_dir) == 2, process, run_dir, "engine-1 came back")
        os.kill(processes_of(process, run_dir)["router"], signal.SIGKILL)
        wait_for_step(process, run_dir, len(lines(run_dir / "metrics.jsonl")) + 5)
        started = descendants(process)
        process.send_signal(signal.SIGTERM)
        code, text = finish(process, run_dir)
    assert code == 128 + signal.SIGTERM, text
    assert "stopped by SIGTERM" in text
    assert "engine-1 died (killed by SIGKILL" in text
    assert text.count("router died (killed by SIGKILL") == 2
    nothing_is_left(run_dir, started)


def test_trainer_rank_that_is_stopped_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """The other rank waits for it in a collective, for half an hour without supervision."""
    run_dir = tmp_path / "run"
    overrides = ["run.max_steps=100000", "eval.questions=0", "trainer.tensor_parallel=2", "cluster.stall_timeout=10"]
    with start(run_dir, *overrides) as process:
        wait_for_step(process, run_dir, 2)
        started = descendants(process)
        os.kill(processes_of(process, run_dir)["trainer-1"], signal.SIGSTOP)
        code, text = finish(process, run_dir)
    assert code == 1, text
    assert "asyncrl-train: trainer-1 makes no progress: its last report is 'step " in text
    (state,) = (line for line in text.splitlines() if line.startswith("  trainer-1: "))
    assert state.startswith("  trainer-1: stopped by a signal; step ")
    waiting = stack_file(run_dir / "logs", "trainer-0").read_text()
    assert "train (asyncrl/trainer/loop.py" in waiting, waiting
    assert re.search(r"^  rollout: \w+; serving, for \d+ s.*; in ", text, re.MULTILINE), text
    nothing_is_left(run_dir, started)


BLOCKING = """
import time

class Agent:
    async def run(self, prompt, generate):
        from asyncrl.schema import Trajectory, Turn
        first = await generate(prompt.token_ids)
        blocks_the_loop()
        return Trajectory([Turn([], first)])

def blocks_the_loop():
    time.sleep(600)
"""


@pytest.mark.usefixtures("stub_workload")
def test_agent_that_blocks_the_event_loop_is_named_with_its_line(tmp_path: Path) -> None:
    """A blocking wait cannot be ended by a time limit of the episode, and blocks all others."""
    (tmp_path / "blocking.py").write_text(BLOCKING)
    run_dir = tmp_path / "run"
    overrides = ["agent=blocking:Agent", "eval.questions=0", "cluster.stall_timeout=8", "cluster.tls=false"]
    with start(run_dir, *overrides, module=STUBS) as process:
        code, text = finish(process, run_dir)
    assert code == 1, text
    assert "rollout makes no progress: its last report is 'serving'" in text
    (state,) = (line for line in text.splitlines() if line.startswith("  rollout: "))
    assert "; in blocks_the_loop (blocking.py:12)" in state
    nothing_is_left(run_dir)
