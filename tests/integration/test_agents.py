"""Agents and environments of users on the real engine: they train, and the run continues whatever they do."""

from __future__ import annotations

import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from tests.extensions.sandbox.machine import public
from tests.integration.books import balanced, groups_of
from tests.integration.running import lines, nothing_is_left, run

pytestmark = pytest.mark.integration
__all__ = ["public"]
MARKS = ("fault", "held")

SMALLEST = '''
async def my_agent(prompt, generate, bonus):
    """Asks twice, forgets what it asked, and keeps everything."""
    first = await generate(prompt.token_ids)
    second = await generate([12, *first.token_ids[:1], 11], max_new_tokens=2)
    return bonus + len(second.token_ids)
'''


def test_edited_context_trains_every_answered_token(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SMALLEST)
    run_dir = tmp_path / "run"
    run(
        run_dir,
        *("agent=mine:my_agent", "+agent_params.bonus=0.5", "run.max_steps=2", "eval.questions=0", "record=true"),
    )
    assert balanced(run_dir).tokens.discarded == 0
    for trajectory in (t for g in groups_of(run_dir) for t in g.trajectories):
        first, second = trajectory.turns
        assert (first.begins, second.begins, second.observation[0]) == (False, True, 12)
        assert trajectory.reward == 0.5 + len(second.completion.token_ids)


def faults(run_dir: Path, public: Path, count: int, steps: int, *settings: str) -> Counter[str]:
    """Run a training whose environments have about `count` faults, and whose sandboxes are attacked.

    Return the number of reported failures by reason. For `public` see tests/extensions/sandbox/machine.py.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        told = _faults(run_dir, public, server.getsockname()[1], count, steps, *settings)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [path.read_text() for path in run_dir.parent.glob("escaped-*")] == []
    return told


def _faults(run_dir: Path, public: Path, port: int, count: int, steps: int, *settings: str) -> Counter[str]:
    run(
        run_dir,
        *settings,
        *("task=own", "task.kind=tests.integration.faulty_envs:Copying", "task.name=copying"),
        *(f"+task.params.marks={run_dir.parent}", f"+task.params.faults={count}"),
        *(f"+task.params.public={public}", f"+task.params.port={port}"),
        *("rollout.batch_groups=4", "rollout.group_size=4", f"run.max_steps={steps}", "eval.questions=0"),
        *("task.environments.hosted=true", "task.environments.per_process=4"),
        *("task.environments.step_timeout=8", "task.environments.reset_timeout=20"),
        *("rollout.retries=1", "task.environments.max_failures=1000", "task.environments.warm=4"),
        *("rollout.max_failures=1000", "rollout.max_staleness=4"),
        timeout=600 + 2 * count,
    )
    balanced(run_dir)
    nothing_is_left(run_dir)
    warnings = [line["warning"].partition(" failed: ")[2] for line in lines(run_dir / "warnings.jsonl")]
    return Counter(warning.split(":")[0] for warning in warnings if warning)


def test_environments_at_fault_cost_their_episodes_alone(
    tmp_path: Path, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    told = faults(tmp_path / "run", public, 30, 12, "+task.params.share=0.5")
    assert len(told) >= 2  # which faults occur is drawn
    assert told.keys() <= {f"environment_{how}" for how in ("died", "timeout", "error", "garbage", "oversized")}
    assert len(list(tmp_path.glob("fault-*"))) >= 20  # that were really committed


@pytest.mark.campaign
def test_a_thousand_faults(tmp_path: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a thousand faults; ASYNCRL_TRIALS sets the number."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")]))
    count = int(os.environ.get("ASYNCRL_TRIALS", "20"))
    told = faults(tmp_path / "run", public, count, max(10, count // 2), "+task.params.share=0.6")
    committed, held = (Counter(path.name.split("-")[1] for path in tmp_path.glob(f"{what}-*")) for what in MARKS)
    print(f"faults: {dict(committed)}; attacks held: {dict(held)}; told: {dict(told)}")
    assert committed.total() >= 0.8 * count
