"""What running groups wait for, and status.json in the run folder: what the run does now, replaced once a second, for
pages and people that read files.

    time, version, waiting_for, batch, ledger   as GET /status returns them, and when
    holding         whether requests are held back because the weights change
    episodes        number of running episodes by phase
    groups          the running groups that have been silent longest: uid, task, born, tokens, seconds of silence, and
                    each episode's phase, what it waits for, since how many seconds, and its tokens
    groups_left_out number of running groups beyond MOST_GROUPS
    seconds         CPU time that the event loop has spent on this file so far
    engines         url, state ("serving", or "silent": dead, restarting or not yet in the fleet), version and load
    (further)       fields of extensions

waits for     the engines' loads (engine/loads.py), and the disk, in a thread
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl import jsonl
from asyncrl.engine.loads import Load, Loads
from asyncrl.errors import EngineError
from asyncrl.extension import RolloutHooks
from asyncrl.network.addresses import Addresses

if TYPE_CHECKING:
    from asyncrl.rollout.groups import GroupInPlay
    from asyncrl.rollout.server import RolloutServer

FILE = "status.json"
PERIOD = 1.0
MOST_GROUPS = 200
"""Number of groups in the file; a run may have ten thousand."""
MOST_ENGINES = 64
"""Number of engines that are asked in every period. More of them are asked less often."""
SHARE = 0.02
"""Largest share of the event loop's time: with very many groups the file is replaced less often."""


def silence(group: GroupInPlay, now: float) -> float:
    """Return the seconds since the last activity of the episode that has been silent longest."""
    return max((now - one.activity.since for one in group.siblings if one.activity.waits_for), default=0.0)


def most_silent(groups: Iterable[GroupInPlay], count: int, now: float) -> list[GroupInPlay]:
    """Return the groups that have been silent longest, in this order."""
    return sorted(groups, key=lambda group: -silence(group, now))[:count]


def described(group: GroupInPlay, now: float) -> str:
    """Describe a group in one line; its slowest episode represents it. Which engine serves it is the router's choice,
    and is not in it: the group's uid is its routing key."""
    left = [one.activity for one in group.siblings if one.activity.waits_for]
    tokens = sum(one.received for one in group.siblings)
    so_far = f"{group.ticket.uid}: {len(left)} of {len(group.siblings)} episodes left, {tokens} tokens"
    if not left:
        return so_far
    slowest = min(left, key=lambda one: one.since)
    return f"{so_far}, waits {now - slowest.since:.0f} s for {slowest.waits_for}"


class StatusFile:
    """Writer of the file."""

    def __init__(
        self,
        run_dir: Path,
        server: RolloutServer,
        loads: Loads,
        addresses: Addresses,
        hooks: Sequence[RolloutHooks] = (),
    ) -> None:
        self._path = run_dir / FILE
        self._server = server
        self._loads = loads
        self._hooks = hooks
        self._more: dict[str, Any] = {}
        self._seconds = 0.0
        self._engines = (*addresses.engines, *addresses.attached)

    async def follow(self) -> None:
        """Replace the file every PERIOD seconds until cancelled. A disk that refuses it is reported once."""
        warned = False
        while True:
            try:
                loads = await self._loads.recent(PERIOD * max(1.0, len(self._loads.latest) / MOST_ENGINES))
            except EngineError:
                loads = []  # engines without the endpoint, of which rollout.max_running_groups=auto says more
            began = time.thread_time()
            self._more = {name: value for one in self._hooks for name, value in one.status().items()}
            now = self.now(loads)
            spent = time.thread_time() - began
            self._seconds += spent
            try:
                await asyncio.to_thread(jsonl.replace, self._path, now)
            except OSError as error:
                if not warned:
                    print(f"asyncrl: {self._path} cannot be written: {error}", file=sys.stderr, flush=True)
                warned = True
            await asyncio.sleep(max(PERIOD, spent / SHARE))

    def now(self, loads: Sequence[Load] | None = None) -> dict[str, Any]:
        """Return the content of the file, by default with the newest loads."""
        loads = self._loads.latest if loads is None else loads
        state, groups = self._server.state(), self._server.groups.running()
        return {
            "time": time.time(),
            **state,
            "holding": self._server.inflight.holding,
            "episodes": Counter(one.activity.phase for group in groups for one in group.siblings),
            **_silent(groups),
            "seconds": self._seconds,
            "engines": self._fleet(loads, state["version"]),
            **self._more,
        }

    def _fleet(self, loads: Sequence[Load], version: int) -> list[dict[str, Any]]:
        serving = [{"url": one.url, "state": "serving", "version": version, **_fields(one)} for one in loads]
        silent = sorted(set(self._engines) - {one.url for one in loads})
        return [*serving, *({"url": url, "state": "silent"} for url in silent)]


def _fields(load: Load) -> dict[str, Any]:
    """Return a load with what extensions know of the engine."""
    fields = asdict(load)
    return fields | fields.pop("more")


def _silent(groups: Sequence[GroupInPlay]) -> dict[str, Any]:
    """Return the groups that have been silent longest, and the number of the others."""
    now = time.monotonic()
    named = [
        {
            "uid": group.ticket.uid,
            "task": group.prompt.task,
            "born": group.ticket.born,
            "tokens": sum(one.received for one in group.siblings),
            "seconds": round(silence(group, now), 3),
            "episodes": [
                {
                    "phase": one.activity.phase,
                    "waits_for": one.activity.waits_for,
                    "seconds": round(now - one.activity.since, 3),
                    "tokens": one.received,
                }
                for one in group.siblings
            ],
        }
        for group in most_silent(groups, MOST_GROUPS, now)
    ]
    return {"groups": named, "groups_left_out": len(groups) - len(named)}
