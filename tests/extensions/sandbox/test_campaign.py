"""Attacks drawn at random, several sandboxes at once, cancelled, closed and killed at random moments: whoever attacks
harms nobody else, every call ends as it must or fails typed, and nothing is left. A trial is its seed."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
import pytest

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.sandbox.local import LocalSandboxes
from asyncrl.extensions.sandbox.protocol import run_python
from tests.extensions.sandbox import attacks
from tests.extensions.sandbox.attacks import Attack
from tests.extensions.sandbox.machine import (
    DEADLINE,
    KINDS,
    backend,
    leaves_nothing,
    left,
    needs_bubblewrap,
    processes,
    public,
)
from tests.extensions.sandbox.ways import Kind

pytestmark = [pytest.mark.integration, pytest.mark.campaign, needs_bubblewrap]
__all__ = ["leaves_nothing", "public"]
TRIALS = int(os.environ.get("ASYNCRL_TRIALS", "20"))
ATTACKERS, CALLS, WORKERS = 4, 3, 2
"""Sandboxes that attack, calls of each, and sandboxes that do honest work meanwhile."""
CANCELLED, CLOSED, KILLED = 0.15, 0.1, 0.1
"""Shares of the calls to which that happens."""


class Trial:
    """One."""

    def __init__(self, seed: int, kind: Kind, known: Sequence[Attack]) -> None:
        self._choose, self._kind, self._known = random.Random(seed), kind, known
        self._marks = count()
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """All of it."""
        async with asyncio.timeout(4 * DEADLINE), backend(self._kind, warm=self._choose.randint(0, 3)) as opened:
            attackers = [asyncio.ensure_future(self._attack(opened)) for _ in range(ATTACKERS)]
            workers = [asyncio.ensure_future(self._work(opened, attackers)) for _ in range(WORKERS)]
            await asyncio.gather(*attackers, *workers)
        assert processes() == {}

    async def _work(self, opened: LocalSandboxes, attackers: Sequence[asyncio.Future[None]]) -> None:
        """Work until the attackers have ended. Nobody attacks this worker, so nothing may go wrong."""
        sandbox, number = await opened.open(), 0
        while number < 3 or not all(attacker.done() for attacker in attackers):
            await sandbox.write("number", str(number).encode())
            source = "number = int(open('number').read()); open('next', 'w').write(str(number + 1)); print(number)"
            outcome = await run_python(sandbox, source)
            assert outcome.text == f"{number}\n", outcome
            number = int(await sandbox.read("next"))
        await sandbox.close()
        self.done["honest calls"] += number

    async def _attack(self, opened: LocalSandboxes) -> None:
        sandbox = await opened.open()
        for _ in range(CALLS):
            attack, fate, delay = self._choose.choice(self._known), self._choose.random(), self._choose.uniform(0, 0.5)
            if CANCELLED + CLOSED <= fate < CANCELLED + CLOSED + KILLED:
                attack = self._choose.choice([attacks.STUBBORN, attacks.FORK_BOMB])  # that are there to be found
            mark = f"{attacks.MARK}-{next(self._marks)}"
            calling = asyncio.ensure_future(attack.on(sandbox, mark))
            if fate < CANCELLED + CLOSED + KILLED:
                await asyncio.wait([calling], timeout=delay)
            if fate < CANCELLED:
                calling.cancel()
                self.done["cancelled"] += 1
            elif fate < CANCELLED + CLOSED:
                await sandbox.close()
                self.done["closed"] += 1
            elif fate < CANCELLED + CLOSED + KILLED:
                self.done["worker killed"] += _kill_worker(mark)
            with suppress(asyncio.CancelledError, EpisodeFailed):
                outcome = await calling
                self.done[outcome.reason] += 1
                if outcome.reason == "disk":
                    await sandbox.close()
            if not sandbox.usable:
                await sandbox.close()
                sandbox = await opened.open()
            assert (await run_python(sandbox, "print(1)")).text == "1\n" or not sandbox.usable
        await sandbox.close()


def _kill_worker(mark: str) -> bool:
    """That of the guest with this mark, if it runs yet or still."""
    with suppress(psutil.Error):
        for pid, command in processes().items():
            if mark in command and mark not in (parent := psutil.Process(psutil.Process(pid).ppid())).cmdline():
                parent.kill()
                return True
    return False


@pytest.mark.parametrize("seed", range(TRIALS))
def test_attackers_harm_nobody_and_leave_nothing(seed: int, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-for-guests")
    kind = KINDS[seed % len(KINDS)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        more = [
            attacks.network(server.getsockname()),
            attacks.files(str(public / "secret"), str(public), os.path.realpath(sys.prefix)),
        ]
        trial = Trial(seed, kind, [*attacks.GENERAL, *attacks.HEAVY, *attacks.PROBES, *more])
        asyncio.run(trial.run())
        with pytest.raises(BlockingIOError):
            server.accept()
    assert left() == []
    print(f"trial {seed}: {kind}, " + ", ".join(f"{times} {name}" for name, times in sorted(trial.done.items())))
