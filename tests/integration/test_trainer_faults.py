"""Whatever dies of the trainers and of the rollout process, at any moment and several times, the run ends with all of
its steps, and nothing shows in what it trained.

Trainers are killed, stopped, exit, and run into a limit of their memory; the rollout process is killed and stopped,
also while either is started again; engines and the router fail beside. The loss of some batches is no number, always of
the same ones. Stub engines write down the weights that they get: what is published again must be what it was. Trained
again without any death, the recording gives the same losses, gradients and weights bit for bit. A trial is its seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.network.addresses import READY, times_out_of_memory
from tests.integration.books import check_books, check_replay
from tests.integration.faults import CUT, KILLED, ROUTER_KILLED, ROUTER_STOPPED, STOPPED, Fault, Injector, draw
from tests.integration.ranks import ROOT
from tests.integration.running import (
    GROUP,
    RUN,
    TIMEOUT,
    evidence,
    finish,
    lines,
    nothing_is_left,
    processes_of,
    start,
)
from tests.integration.workload import Workload

TRIALS = int(os.environ.get("ASYNCRL_TRIALS", "20"))
FIRST = int(os.environ.get("ASYNCRL_FIRST_TRIAL", "0"))
STEPS, APART = 30, 6
"""Steps of a run, and between two that are drawn for a death: a fourth within ten steps would end the run."""
LENGTH = f"run.max_steps={STEPS}"
LAYOUTS = {
    "single": [],
    "dp2": ["trainer.data_parallel=2"],
    "tp2": ["trainer.tensor_parallel=2"],
    "pp2": ["trainer.pipeline_parallel=2"],
    "parts, overlap": ["weights.overlap=true", "trainer.batch_parts=2"],
}
DIES, HANGS, EXITS, MEMORY, PUBLISHING = (
    "trainer killed",
    "trainer stopped",
    "trainer exits",
    "trainer out of memory",
    "trainer killed within a publish",
)
ROLLOUT_DIES, ROLLOUT_HANGS, BOTH = "rollout killed", "rollout stopped", "trainer and rollout killed"
DEATHS = [DIES, DIES, HANGS, EXITS, MEMORY, PUBLISHING, ROLLOUT_DIES, ROLLOUT_DIES, ROLLOUT_HANGS, BOTH]
LATEST = {0: 3.0, STEPS: 3.0}
"""Seconds after a step within which a death comes, where the run first publishes, and where it evaluates and ends."""
ASKED = {EXITS: "exits", MEMORY: "memory"}
"""Files that make the loss fail."""
PLANTED = """
import os
import resource
from pathlib import Path

import torch


def asked(what):
    try:
        os.unlink(what)  # by one rank
    except FileNotFoundError:
        return False
    return True


def planted(logprobs, rows):
    if asked("exits"):
        os._exit(7)
    if asked("memory"):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, resource.RLIM_INFINITY))
        torch.empty(2**30, dtype=torch.uint8)
    loss = -rows.advantages * logprobs
    return loss * float("nan") if logprobs.numel() % 11 == 5 else loss
"""
"""A loss, in a module of the user, that fails when a file asks for it."""


@dataclass(frozen=True)
class Death:
    """Death of trainers, of the rollout process, or of both."""

    kind: str
    version: int  # once this many steps are trained
    delay: float  # seconds after that
    rank: int = 0


@dataclass(frozen=True)
class Trial:
    """Deaths and faults of one run."""

    seed: int
    layout: str
    engines: int
    more: list[str]
    faults: list[Death | Fault]

    def __str__(self) -> str:
        """Return a description from which the trial can be repeated."""
        head = f"trial {self.seed}: {self.layout}, {self.engines} engines {' '.join(self.more)}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def drawn(seed: int) -> Trial:
    """Return a trial. At most two deaths come at one step, and three within ten: more would end the run."""
    choose = random.Random(seed)
    layout, engines = choose.choice(list(LAYOUTS)), choose.randint(1, 2)
    deaths = [
        Death(choose.choice(DEATHS), step, choose.uniform(0.0, LATEST.get(step, 0.5)), choose.randrange(2))
        for step in drawn_steps(choose)
    ]
    if choose.random() < 0.6:  # while what died before is started again
        step, kind = choose.choice(deaths).version, choose.choice([DIES, ROLLOUT_DIES, BOTH])
        deaths.append(Death(kind, step, choose.uniform(0.5, 8.0), choose.randrange(2)))
    kinds = [KILLED, STOPPED, ROUTER_KILLED, ROUTER_STOPPED, CUT, CUT]
    beside = draw(choose, kinds, choose.randint(0, 3), engines=engines, versions=STEPS - 2, stopped=(0.1, 5.0))
    more = choose.choice([[], [], [], ["processes.count=2"]])
    return Trial(seed, layout, engines, more, sorted([*deaths, *beside], key=lambda one: (one.version, one.delay)))


def drawn_steps(choose: random.Random) -> list[int]:
    """Return the steps of one to four deaths."""
    count = choose.randint(1, 4)
    while True:
        steps = sorted(choose.sample(range(STEPS + 1), count))
        if all(later - earlier >= APART for earlier, later in pairwise(steps)):
            return steps


@dataclass
class Striker:
    """What kills and stops the processes of one run."""

    launcher: subprocess.Popen[str]
    run_dir: Path
    injector: Injector
    told: list[str] = field(default_factory=list)
    """Deaths that came, and after which step."""

    def strike(self, death: Death) -> None:
        """Wait for the moment, and strike. Nothing happens to a run that has ended."""
        if not self._wait_for(death.version):
            return
        time.sleep(death.delay)
        number = signal.SIGSTOP if death.kind in (HANGS, ROLLOUT_HANGS) else signal.SIGKILL
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            named = processes_of(self.launcher, self.run_dir)
            self.injector.seen |= {psutil.Process(pid) for pid in named.values()}
            trainers = sorted(name for name in named if name.startswith("trainer-"))
            victims = trainers[death.rank % len(trainers) :][:1] if trainers and death.kind != ROLLOUT_DIES else []
            if death.kind in (ROLLOUT_DIES, BOTH):
                victims += {"rollout"} & named.keys()
            elif death.kind == ROLLOUT_HANGS:
                victims = list({"rollout"} & named.keys())
            if not victims:
                return
            if asked := ASKED.get(death.kind):
                (self.run_dir.parent / asked).touch()
            elif death.kind == PUBLISHING:
                self._kill_within_a_publish(named, victims[0])
            else:
                for victim in victims:
                    os.kill(named[victim], number)
            self.told.append(f"{death.kind} at {len(lines(self.run_dir / 'metrics.jsonl'))}")

    def _wait_for(self, step: int) -> bool:
        """Return whether the run still goes on when it comes to this step; step 0 is reached when all is up."""
        deadline, trained = time.monotonic() + TIMEOUT, self.run_dir / "metrics.jsonl"
        while self.launcher.poll() is None:
            if (self.run_dir / READY).exists() and len(lines(trained)) >= step:
                return True
            assert time.monotonic() < deadline, f"no step {step} within {TIMEOUT} s:\n{evidence(self.run_dir)}"
            time.sleep(0.02)
        return False

    def _kill_within_a_publish(self, named: dict[str, int], victim: str) -> None:
        """Stop the engines until a trainer waits for them, or some seconds have passed."""
        engines = [psutil.Process(pid) for name, pid in named.items() if name.startswith("engine-")]
        doing, deadline = self.run_dir / "progress/trainer-0.lease", time.monotonic() + 2.0
        for engine in engines:
            engine.send_signal(signal.SIGSTOP)
        while time.monotonic() < deadline and "publishing" not in (doing.read_text() if doing.exists() else ""):
            time.sleep(0.02)
        with suppress(ProcessLookupError):
            os.kill(named[victim], signal.SIGKILL)
        for engine in engines:
            with suppress(psutil.NoSuchProcess):
                engine.send_signal(signal.SIGCONT)


def play(trial: Trial, folder: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]) -> Path:
    """Run a trial to its end, and return its folder."""
    print(trial)
    began, run_dir = time.monotonic(), folder / "run"
    lengths = Lengths(mean=16.0, sigma=0.9, longest=40, group_size=GROUP, seed=trial.seed)
    workload = Workload(
        lengths=asdict(lengths),
        per_token=0.005,
        start_after=[0.0] * trial.engines,
        train_seconds=0.0,
        loaded=str(folder / "loaded.jsonl"),
    )
    (folder / "planted.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in workload.environment().items():
        monkeypatch.setenv(name, value)
    overrides = [
        *(one for one in RUN if not one.startswith("cluster.on_death")),
        LENGTH,
        *LAYOUTS[trial.layout],
        *trial.more,
        f"engine.count={trial.engines}",
        "algo.loss=planted:planted",
        "trainer.max_bad_steps=100",
        "rollout.max_new_tokens=40",
        "weights.transport=disk",
        "weights.verify=false",  # the stubs hold no weights; they write down what they get
        "weights.timeout=5",
        "engine.request_timeout=20",
        "cluster.tls=false",
        "cluster.stall_timeout=10",
        "cluster.max_restarts=100",
    ]
    with (
        start(run_dir, *overrides, module="tests.integration.stub_run") as process,
        Injector(process, run_dir) as injector,
    ):
        striker = Striker(process, run_dir, injector)
        for fault in trial.faults:
            if isinstance(fault, Death):
                striker.strike(fault)
            elif process.poll() is None:
                injector.inject([fault])
        code, text = finish(process, run_dir)
    assert code == 0, f"{text}\n{evidence(run_dir)}"
    nothing_is_left(run_dir, list(injector.seen))
    for kind, asked in ASKED.items():
        if (folder / asked).exists():  # no loss was computed after that
            striker.told.remove([one for one in striker.told if one.startswith(kind)][-1])
            (folder / asked).unlink()
    tally.update(injector.done)
    tally.update(one.rpartition(" at ")[0] for one in striker.told)
    recoveries = json.loads((run_dir / "summary.json").read_text())["recoveries"]
    beside = ", ".join(f"{count} {kind}" for kind, count in sorted(injector.done.items()) if count)
    print(
        f"trial {trial.seed}: {trial.layout}: {', '.join(striker.told) or 'no death'}; {recoveries} recoveries; "
        f"beside: {beside or 'none'}; {time.monotonic() - began:.0f} s"
    )
    return run_dir


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    """Count deaths and faults of all trials by kind, and print them."""
    counted: Counter[str] = Counter()
    yield counted
    print(f"\nin all: {', '.join(f'{count} {kind}' for kind, count in sorted(counted.items()))}")


def check_published(folder: Path) -> None:
    """Check that a version that was published several times, to several engines or again after a death, was the
    same."""
    digests = defaultdict[str, set[str]](set)
    for line in lines(folder / "loaded.jsonl"):
        digests[line["folder"]].add(line["digest"])
    assert len(digests) > STEPS // 2
    assert {name: len(found) for name, found in digests.items() if len(found) > 1} == {}


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(FIRST, FIRST + TRIALS))
def test_deaths_at_any_moment_do_not_show(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]
) -> None:
    trial = drawn(seed)
    run_dir = play(trial, tmp_path, monkeypatch, tally)
    check_books(run_dir, STEPS)
    assert [line["version_max"] for line in lines(run_dir / "eval.jsonl")] == [0, STEPS]  # each once
    times = times_out_of_memory(run_dir)
    if times < 2:  # with smaller micro-batches, sums are formed in another order
        check_published(tmp_path)
        check_replay(run_dir, tmp_path, LENGTH, *LAYOUTS[trial.layout])
