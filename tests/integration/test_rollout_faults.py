"""Whatever fails around the rollout process, the run ends with all of its steps; no token is lost, doubled or false.

Engines and the router are killed and stopped, streams are reset in the middle, the trainer reads slowly, breaks off or
comes late, agents hang and rewards raise; several of it at once, while versions change. Over stub engines, which write
what their prompt says, every token that is trained is known; the rest of the run is asyncrl-train (stub_run.py). Over
the real engines it is asyncrl-train alone. A trial is its seed.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.plan.lengths import Lengths
from asyncrl.extensions.plan.simulation import SimulatedEpisode
from asyncrl.schema import Batch, Trajectory, decode_batch
from scripts.stub_engine import number_of
from tests.integration.books import balanced
from tests.integration.faults import CUT, KILLED, ROUTER_KILLED, ROUTER_STOPPED, STOPPED, Fault, Injector, draw
from tests.integration.faulty_users import HANGS, RAISES, write_questions
from tests.integration.ranks import ROOT
from tests.integration.running import finish, lines, nothing_is_left, start
from tests.integration.stub_trainer import BATCHES
from tests.integration.workload import Workload

TRIALS = int(os.environ.get("ASYNCRL_TRIALS", "20"))
STEPS, LAST = 40, 30
"""Number of batches of a trial with stubs, and the last version after which faults are injected."""
REAL_STEPS, REAL_LAST = 150, 50
LATE, SLOW = "late reader", "slow reader"
REASONS = {"reward_error": RAISES, "agent_timeout": HANGS}
"""Reasons in the ledger, and the faults that cause them."""
UNSEATED = {"surplus", "over_age"}
"""Reasons that no fault causes: other groups were faster (rollout.oversample)."""


@dataclass(frozen=True)
class Trial:
    """Faults of one run."""

    seed: int
    overrides: dict[str, Any]
    faults: list[Fault]
    workload: Workload | None = None  # over stubs

    def __str__(self) -> str:
        """Return a description from which the trial can be repeated."""
        parts = [f"trial {self.seed}", *(f"{name}={value}" for name, value in self.overrides.items())]
        parts += [f"  {fault}" for fault in self.faults]
        return "\n".join([*parts, f"  {self.workload}"] if self.workload else parts)


def over_stubs(seed: int) -> Trial:
    """Return a trial of some seconds with stub engines."""
    choose = random.Random(seed)
    engines, size, bound = choose.randint(1, 3), choose.randint(2, 4), choose.randint(0, 3)
    lengths = Lengths(
        mean=choose.choice([8.0, 20.0]),
        sigma=0.9,
        longest=48,
        group_size=size,
        turns=choose.choice([1.0, 1.0, 2.0]),
        most_turns=4,
        seed=seed,
    )
    late = choose.sample(range(STEPS), 2)
    slow = choose.sample(range(STEPS), 3)
    workload = Workload(
        lengths=asdict(lengths),
        per_token=choose.choice([0.005, 0.02]),
        start_after=[choose.uniform(0.0, 2.0) for _ in range(engines)],
        train_seconds=choose.choice([0.0, 0.1]),
        late={version: choose.uniform(0.5, 2.0) for version in late},
        slow={version: choose.uniform(0.1, 0.9) for version in slow},
    )
    overrides = {
        "run.max_steps": STEPS,
        "engine.count": engines,
        "engine.request_timeout": 20,
        **choose.choice([{}, {}, {"+requests.fields.return_routed_experts": "true"}]),
        "rollout.batch_groups": choose.randint(2, 4),
        "rollout.group_size": size,
        "rollout.max_staleness": bound,
        "rollout.lead": choose.choice(["null", choose.randint(0, bound)]),
        "rollout.max_running_groups": choose.choice(["auto", "null"]),
        "rollout.max_new_tokens": 48,
        "rollout.coalesce": choose.choice(["true", "false"]),
        "rollout.cache_key": choose.choice(["version", "group"]),
        "rollout.oversample": choose.choice([0, 0, 1]),
        "agent": "tests.integration.faulty_users:Turns",
        "rollout.agent_timeout": 1.0,
        "weights.pause_mode": choose.choice(["in_place", "in_place", "retract", "abort", "drain"]),
        "weights.verify": "false",  # there is nothing to verify
        "weights.timeout": 3.0,
        "cluster.max_restarts": 100,
    }
    kinds = [KILLED, STOPPED, ROUTER_KILLED, ROUTER_STOPPED, CUT, CUT]
    faults = draw(choose, kinds, choose.randint(3, 6), engines=engines, versions=LAST, stopped=(0.1, 8.0))
    return Trial(seed, overrides, faults, workload)


def over_engines(seed: int) -> Trial:
    """Return a trial of a minute or two with real engines."""
    choose = random.Random(seed)
    overrides = {
        "run.max_steps": REAL_STEPS,
        "engine.count": 2,
        "weights.timeout": 10.0,
        "rollout.batch_groups": 4,
        "rollout.group_size": 4,
        "rollout.max_staleness": choose.randint(0, 2),
        "agent": "tests.integration.faulty_users:OneTurn",
        "rollout.agent_timeout": 2.0,
        "weights.pause_mode": choose.choice(["in_place", "retract", "abort"]),
        "cluster.max_restarts": 100,
    }
    kinds = [KILLED, STOPPED, ROUTER_KILLED, ROUTER_STOPPED]
    faults = draw(choose, kinds, choose.randint(2, 3), engines=2, versions=REAL_LAST, stopped=(1.0, 30.0))
    return Trial(seed, overrides, faults)


@pytest.fixture(scope="module")
def tally() -> Iterator[Counter[str]]:
    """Count the faults of all trials by kind, and print them."""
    counted: Counter[str] = Counter()
    yield counted
    print(f"\nin all {counted.total()} faults: {told(counted)}")


def told(counted: Counter[str]) -> str:
    """Return the counts as text."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counted.items()))


def play(trial: Trial, folder: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]) -> Path:
    """Run a trial to its end, check the invariants of every run, and return its folder."""
    print(trial)
    began, run_dir, questions = time.monotonic(), folder / "run", folder / "questions.jsonl"
    write_questions(questions, trial.seed, raises=0.02, hangs=0.01)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, value in (trial.workload.environment() if trial.workload else {}).items():
        monkeypatch.setenv(name, value)
    overrides = {
        **trial.overrides,
        "task": "file",
        "task.train_file": questions,
        "task.reward": "tests.integration.faulty_users:score",
        "eval.questions": 0,
        "cluster.tls": trial.workload is None,  # stub engines have no certificates
    }
    module = "tests.integration.stub_run" if trial.workload else "asyncrl.launch.main"
    with (
        start(run_dir, *[f"{name}={value}" for name, value in overrides.items()], module=module) as process,
        Injector(process, run_dir) as injector,
    ):
        injector.inject(trial.faults)
        code, text = finish(process, run_dir)
    assert code == 0, text
    nothing_is_left(run_dir, list(injector.seen))
    ledger = balanced(run_dir)
    rejected = Counter(ledger.groups.rejected)
    assert rejected.keys() <= REASONS.keys() | UNSEATED
    injector.done.update({REASONS[reason]: count for reason, count in rejected.items() if reason in REASONS})
    if trial.workload:
        injector.done.update({LATE: len(trial.workload.late), SLOW: len(trial.workload.slow)})
    tally.update(injector.done)
    retried = ", ".join(f"{count} {cause}" for cause, count in ledger.events.retried.items())
    print(
        f"trial {trial.seed}: {told(injector.done)}: {ledger.tokens.trained} tokens in {ledger.groups.trained} groups, "
        f"asked anew {retried}; {time.monotonic() - began:.0f} s"
    )
    return run_dir


# -- every token over stubs ----------------------------------------------------------------------------------


def check_batches(trial: Trial, run_dir: Path) -> None:
    """Check that the trainer received what the stubs must have generated, within the bound, and as the ledger counts
    it."""
    assert trial.workload
    batches = [decode_batch(file.read_bytes()) for file in sorted((run_dir / BATCHES).iterdir())]
    assert [batch.version for batch in batches] == list(range(STEPS))
    episodes = trial.workload.episodes()
    for batch in batches:
        assert len(batch.groups) == trial.overrides["rollout.batch_groups"]
        for group in batch.groups:
            siblings = episodes(number_of(group.prompt_ids))
            assert len(group.trajectories) == len(siblings)
            for trajectory in group.trajectories:
                check_tokens(trajectory, siblings)
                check_versions(trajectory, batch, trial.overrides["rollout.max_staleness"])
    groups = [group for batch in batches for group in batch.groups]
    assert len({group.slot for group in groups}) == len(groups), "a slot was trained twice"
    trained = balanced(run_dir)
    assert trained.groups.trained == len(groups)
    assert trained.trajectories.trained == sum(len(group.trajectories) for group in groups)
    assert trained.tokens.trained == sum(group.num_tokens for group in groups)


def check_tokens(trajectory: Trajectory, siblings: Sequence[SimulatedEpisode]) -> None:
    """Check the tokens. The first one tells the sample: the stubs count those of a prompt, also if one is asked for
    again."""
    sample = trajectory.turns[0].completion.token_ids[0]
    written = [turn.completion.token_ids for turn in trajectory.turns]
    first, *others = siblings[sample].turns
    assert written == [[sample, *[0] * (first - 1)], *([0] * turn for turn in others)]


def check_versions(trajectory: Trajectory, batch: Batch, bound: int) -> None:
    """Check that versions ascend and are within the bound. (Completion checks that they partition each answer.)"""
    spans = [span for turn in trajectory.turns for span in turn.completion.versions]
    versions = [span.version for span in spans]
    assert versions == sorted(versions)
    assert batch.version - bound <= versions[0]
    assert versions[-1] <= batch.version
    assert all(span.start < span.end for span in spans)


def check_real(trial: Trial, run_dir: Path) -> None:
    """Check that all steps were trained within the bound."""
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["version"] for step in steps] == list(range(1, REAL_STEPS + 1))
    assert max(step["staleness/max"] for step in steps) <= trial.overrides["rollout.max_staleness"]
    assert balanced(run_dir).groups.trained == REAL_STEPS * trial.overrides["rollout.batch_groups"]


FEW = [pytest.param(seed, marks=pytest.mark.integration) for seed in (7,)]
MANY = [pytest.param(seed, marks=pytest.mark.campaign) for seed in (17, *range(100, 100 + TRIALS))]


@pytest.mark.parametrize("seed", [*FEW, *MANY])
def test_faults_around_the_rollout_process_cost_no_token(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]
) -> None:
    trial = over_stubs(seed)
    check_batches(trial, play(trial, tmp_path, monkeypatch, tally))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(100, 100 + max(1, TRIALS // 5)))
def test_faults_around_real_engines(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]
) -> None:
    trial = over_engines(seed)
    check_real(trial, play(trial, tmp_path, monkeypatch, tally))
