"""Engines join and leave a running training; others are already running when it begins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from asyncrl.engine.server import server_argv
from asyncrl.models import catalog
from asyncrl.network.ports import free_port
from tests.fakes import tiny_config
from tests.integration.books import balanced
from tests.integration.running import (
    alive,
    finish,
    lines,
    nothing_is_left,
    processes_of,
    run,
    serving,
    start,
    wait_for_step,
    wait_until,
)

HOST, KEY = "127.0.0.1", "key-of-engines-elsewhere"
LONG = ("run.max_steps=100000", "eval.questions=0", "rollout.batch_groups=4", "rollout.group_size=8")


@contextmanager
def adding(run_dir: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run asyncrl-engines add, with its output in adding.out."""
    with run_dir.with_name("adding.out").open("w") as out:
        words = [sys.executable, "-m", "asyncrl.extensions.join.command", "add", str(run_dir), *arguments]
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(60)


def said(run_dir: Path) -> str:
    return run_dir.with_name("adding.out").read_text()


def asked(command: str, run_dir: Path, *urls: str) -> str:
    words = [sys.executable, "-m", "asyncrl.extensions.join.command", command, str(run_dir), *urls]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.integration
def test_engines_come_and_leave_and_die_while_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def goes_on(steps: int = 5) -> None:
        wanted = len(lines(run_dir / "metrics.jsonl")) + steps
        wait_until(
            lambda: len(lines(run_dir / "metrics.jsonl")) >= wanted or ended(), process, run_dir, f"step {wanted}"
        )
        assert not ended(), said(run_dir)

    def ended() -> bool:
        return keeper.poll() is not None

    with start(run_dir, *LONG) as process:
        wait_for_step(process, run_dir, 3)
        (ours,) = json.loads((run_dir / "addresses.json").read_text())["engines"]
        with adding(run_dir) as keeper:
            wait_until(lambda: serving(run_dir) == 2, process, run_dir, "an engine joined")
            assert asked("list", run_dir).count("joined from") == 1
            guests = psutil.Process(keeper.pid).children(recursive=True)
            assert "left" in asked("remove", run_dir, ours)
            wait_until(lambda: "engine-0" not in processes_of(process, run_dir), process, run_dir, "engine-0 is gone")
            goes_on()  # with the guest alone
            assert serving(run_dir) == 1
            os.kill(keeper.pid, signal.SIGKILL)  # its engine dies with it
            keeper.wait(120)
            wait_until(lambda: not alive(guests), process, run_dir, "the guest is dead")
        with adding(run_dir) as keeper:  # nobody serves, until it does
            goes_on()
            guests = psutil.Process(keeper.pid).children(recursive=True)
            keeper.terminate()
            assert keeper.wait(600) == 0, said(run_dir)
            wait_until(lambda: not alive(guests), process, run_dir, "the guest is gone")
        process.send_signal(signal.SIGINT)
        code, text = finish(process, run_dir)
    assert code == 128 + signal.SIGINT, text
    assert "engine-0 has left" in text
    balanced(run_dir)
    steps = lines(run_dir / "metrics.jsonl")
    assert [step["version"] for step in steps] == list(range(1, len(steps) + 1))
    assert max(step["staleness/max"] for step in steps) <= 2
    nothing_is_left(run_dir)


class Elsewhere:
    """Engine that somebody else runs, with a key of its own."""

    def __init__(self, folder: Path, **more: Any) -> None:
        self.url = f"http://{HOST}:{free_port(HOST)}"
        config = tiny_config()
        words = server_argv(config.engine, catalog.resolve("builtin:tiny"), self.url, gpu=False, seed=1, **more)
        at = words.index("--weight-version")
        self._argv, self._log = [*words[:at], *words[at + 2 :]], folder / "elsewhere.log"

    def start(self) -> None:
        with self._log.open("ab") as log:
            env = {**os.environ, "ASYNCRL_API_KEY": KEY}
            self.process = subprocess.Popen(self._argv, env=env, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 400
        while not self.answers():
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            assert time.monotonic() < deadline, self._log.read_text()[-2000:]
            time.sleep(0.3)

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(120)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Elsewhere]:
    engine = Elsewhere(tmp_path)
    engine.start()
    try:
        yield engine
    finally:
        engine.kill()


@pytest.mark.integration
def test_run_takes_running_engines_and_keeps_them_loaded(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    attached = ("engine.count=0", f"engine.urls=[{elsewhere.url}]")
    with start(tmp_path / "refused", *attached) as process:
        code, text = finish(process, tmp_path / "refused")
    assert code == 2, text
    assert "engine.urls" in text
    assert "API key" in text
    monkeypatch.setenv("ASYNCRL_API_KEY", KEY)
    with start(run_dir, *LONG, *attached, "engine.retry_timeout=600", "weights.timeout=60") as process:
        wait_for_step(process, run_dir, 5)
        elsewhere.kill()
        elsewhere.start()
        wait_until(lambda: len(lines(run_dir / "lost.jsonl")) > 0, process, run_dir, "the loss was seen")
        wait_for_step(process, run_dir, len(lines(run_dir / "metrics.jsonl")) + 5)
        process.send_signal(signal.SIGTERM)
        code, text = finish(process, run_dir)
    assert code == 128 + signal.SIGTERM, text
    assert "stopped by SIGTERM" in text
    assert elsewhere.process.poll() is None  # it is theirs; a publish that was cut short leaves it paused
    balanced(run_dir)
    nothing_is_left(run_dir)
    gaps = [step["logprob_gap/mean"] for step in lines(run_dir / "metrics.jsonl")]
    assert max(gaps) < 0.5, "tokens of weights that are not the run's were trained"


@pytest.mark.campaign  # each of both is in a test of its own
def test_engines_of_the_run_and_others_serve_side_by_side(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASYNCRL_API_KEY", KEY)
    run_dir = tmp_path / "run"
    steps = run(run_dir, "run.max_steps=8", "eval.questions=8", f"engine.urls=[{elsewhere.url}]")
    assert {step["engines/serving"] for step in steps} == {2}
    nothing_is_left(run_dir)


@pytest.mark.campaign  # extensions/plan/test_elastic.py holds the decisions, test_elastic_stubs.py what follows
def test_engine_that_a_slow_trainer_does_not_need_is_given_back(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    elastic = ("engine.count=2", "plan.elastic=act", "plan.min_engines=1", "rollout.max_staleness=2")
    steps = run(run_dir, "run.max_steps=60", "eval.questions=0", *elastic, "algo.epochs=64")
    decisions = lines(run_dir / "elastic.jsonl")
    assert [one["done"] for one in decisions if one["action"] == "remove_engine"], decisions
    assert not any("failed" in one["done"] for one in decisions), decisions
    assert (steps[0]["engines/serving"], steps[-1]["engines/serving"]) == (2, 1)
    assert max(step["staleness/max"] for step in steps) <= 2
    balanced(run_dir)
    nothing_is_left(run_dir)
