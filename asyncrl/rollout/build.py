"""The parts of the rollout process: what there is, what each is built of, and what they do together."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl import import_hooks, lookup
from asyncrl.checkpoints.manifest import ROLLOUT
from asyncrl.config import Config, RolloutConfig
from asyncrl.engine.loads import Loads
from asyncrl.engine.router import wait_until_ready
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import ConfigError, DeadlineExceeded, RecordError
from asyncrl.extension import RolloutHooks
from asyncrl.jsonl import Tail
from asyncrl.network.addresses import READY, Addresses, times_restarted
from asyncrl.rollout import snapshot
from asyncrl.rollout.agent import close_all
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.rollout.events import Began
from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.journal import Journal, Left, NoJournal
from asyncrl.rollout.limiter import FixedConcurrency
from asyncrl.rollout.parts import ModelParts, PlayingParts, PlaysEpisodes
from asyncrl.rollout.prompts import Prompts
from asyncrl.rollout.reporters import RolloutRun, RunReporter
from asyncrl.rollout.server import RolloutServer
from asyncrl.rollout.snapshot import GroupsState, ResumableBuffer, ResumableGroups, Snapshot
from asyncrl.rollout.status import StatusFile
from asyncrl.rollout.timelines import Timelines
from asyncrl.rollout.worker import Worker
from asyncrl.schema import Prompt
from asyncrl.tasks import Task
from asyncrl.tasks.build import build_all
from asyncrl.user_code import load

RETRY_SECONDS = 0.5


class RolloutParts:
    """Everything in the rollout process. It may go on from the snapshot `_resumed`, in which the groups `_outstanding`
    were running. The versions `_since` were announced later, by a process that died, which has `_left` its state."""

    def __init__(self, config: Config, addresses: Addresses, run_dir: Path) -> None:
        """Build all parts. None of them runs yet."""
        self.model = model = ModelParts.load(config, addresses.model, addresses.gpus)
        import_hooks.done()
        self.reporter = RunReporter(run_dir)
        tasks = build_all(config)
        self.run = run = RolloutRun(config, addresses, run_dir, self.reporter.warn, tasks)
        restarts = times_restarted()
        journal = Journal(run_dir, run.warn, restarted=bool(restarts)) if config.recovers else NoJournal()
        self._left = journal.left
        self.hooks = _started_hooks(run)
        self.playing = playing = _playing(run, self.hooks, model, tasks)
        self.reporter.version = lambda: playing.client.inflight.version
        length = model.hf["max_position_embeddings"]
        self._prompts = Prompts(config, tasks, model.template, length, run.warn, model.images, playing.ahead)
        self._weights = {name: task.weight for name, task in config.mixture.items()}
        hooks = list(self.hooks.values())
        self.loads = Loads(addresses.router, addresses.access, more=[one.engines for one in hooks])
        self.timelines = Timelines([one.record for one in self.hooks.values()])
        self.evaluations = Evaluations(
            playing.groups.attempts,
            playing.client,
            tasks,
            self._prompts.held_out,
            config.eval,
            self.reporter.evaluated,
            self.timelines,
            Tail(run_dir / "eval.jsonl")() if restarts else (),
        )
        self.limiter = _limiter(run, self.hooks)
        self._resumed = _snapshot_of(addresses, self._left)
        self.groups = ResumableGroups(
            build_buffer(config.rollout, overlap=config.weights.overlap),
            playing.client,
            limiter=self.limiter,
            publish=self.reporter.publish,
            figures=self._take_figures,
            timelines=self.timelines,
            hooks=hooks,
        )
        self.groups.tell(_began(run, self._resumed))
        self.worker = Worker(
            self.groups,
            playing.client,
            playing.groups,
            self._draw,
            self.limiter,
            group_sizes={name: config.group_size(name) for name in config.mixture},
            max_failures=config.rollout.max_failures,
            max_rejections=config.rollout.max_rejections,
        )
        self.server = server = RolloutServer(
            self.groups,
            playing.client.inflight,
            self.evaluations,
            addresses.api_key,
            journal=journal,
            drain=config.weights.pause_mode == "drain",
            save=self._save,
            number=self._resumed.number if self._resumed else 0,
        )
        server.starting = "the engines to start"
        self.status = StatusFile(run_dir, server, self.loads, addresses, hooks)
        server.more = [route for one in self.hooks.values() for route in one.routes(server, self.status.now)]
        self._outstanding = self._restore(self._resumed) if self._resumed else []
        self._since = self._announced_since()

    def _take_figures(self) -> dict[str, float]:
        """Return the figures of all parts for a batch."""
        return {
            **self.timelines.take_figures(),
            **ChainMap(*(one.figures() for one in self.hooks.values())),
            **ChainMap(self.playing.take_played(), self._prompts.figures(), self.loads.figures()),
        }

    def _draw(self, version: int) -> Prompt:
        """Return the next prompt, while the engines serve a version."""
        weights: Mapping[str, float] = self._weights
        for one in self.hooks.values():
            weights = one.mixture(weights, version)
        return self._prompts.draw(weights)

    def _save(self, state: GroupsState, number: int) -> bytes:
        """Encode a snapshot with the state of the groups, and its number."""
        states = {name: kept for name, one in self.hooks.items() if (kept := one.state()) is not None}
        evaluation = self.evaluations.under_way, self.evaluations.evaluated
        return snapshot.encode(Snapshot(state, self._prompts.cursor(), states, *evaluation, number))

    def _restore(self, resumed: Snapshot) -> list[tuple[Ticket, Prompt, Sequence[GenerationSession]]]:
        """Put the parts into the state of the snapshot, and return the groups that were running."""
        self.evaluations.ready.clear()
        self._prompts.go_on(resumed.cursor)
        for name, state in resumed.extensions.items():
            if name not in self.hooks:
                raise RecordError(f"the checkpoint was written with the extension {name}: set extensions.{name} again")
            self.hooks[name].restore(state)
        return [
            (group.ticket, self._prompts.again(group.prompt.uid, group.prompt.task, group.prompt.index), group.siblings)
            for group in self.groups.restore(resumed.service)
        ]

    def _announced_since(self) -> range:
        """Go on from the version that a process that died has announced last. Return those that its state lacks."""
        version, left = self.groups.published_version, self._left
        if not left.state and left.served is None:
            return range(version + 1, version + 1)
        return self.groups.go_on(version if left.served is None else left.served, held=left.held)

    async def begin(self, working: asyncio.TaskGroup) -> None:
        """Wait until episodes can be played. What goes on meanwhile and afterwards are tasks of `working`."""
        working.create_task(self.status.follow())
        working.create_task(self.playing.serve())
        await self._engines_ready()
        self.server.starting = "the agents and environments to start"
        await self.playing.start()
        self.server.starting = ""
        (self.run.run_dir / READY).touch()
        if times_restarted():
            self._tell_of_restart(float(os.environ["ASYNCRL_DIED_AT"]))
        else:
            self.timelines.phase("start_up", self.run.addresses.started_at)

    async def roll_out(self) -> None:
        """Wait for the engines, and play until cancelled."""
        config, addresses, inflight = self.run.config, self.run.addresses, self.playing.client.inflight
        async with asyncio.TaskGroup() as working:
            await self.begin(working)
            if _trainer_sends_first(config, addresses):
                await self.groups.released()
            if self._resumed is None:
                await self.evaluations.now()  # has the engines to itself: version 0, before the first rollout
            else:
                since = range(self._since.start, self.groups.published_version + 1)  # also announced meanwhile
                self.evaluations.go_on(self._resumed.evaluated, since, running=self._resumed.evaluating)
            working.create_task(self.worker.run(self._outstanding))
            working.create_task(self.server.keeper.keep_regularly())
            working.create_task(self.limiter.watch(self.loads.ask, inflight.take_needed, lambda: inflight.holding))

    async def _engines_ready(self) -> None:
        """Wait until the engines of the policy can answer. What fits their caches may be less than the context. Where
        this process was started again, the trainers decide which engines serve."""
        config, addresses = self.run.config, self.run.addresses
        timeout, attached = config.engine.start_timeout, not config.trains

        def tell(text: str) -> None:
            self.server.starting = text

        if not times_restarted():
            await wait_until_ready(addresses, timeout, attached=attached, tell=tell)
        if self.model.cache is None:
            deadline = time.monotonic() + timeout
            while not (loads := await self.loads.ask()) and times_restarted():
                tell("an engine behind the router")
                if time.monotonic() > deadline:
                    raise DeadlineExceeded("an engine behind the router", timeout)
                await asyncio.sleep(RETRY_SECONDS)
            for engine in loads:
                self.playing.client.narrow(int(engine.longest) - config.engine.draft_room)

    def _tell_of_restart(self, died: float) -> None:
        """Say where a process goes on that died at this time and was started again."""
        self.timelines.phase("recovery", died)
        age = f"{died - self._left.written:.1f} s before its death, with {len(self._outstanding)} groups under way"
        at = f"its state {age}" if self._left.state else "its beginning"
        self.reporter.warn(f"the rollout process goes on after {time.time() - died:.0f} s, from {at}")

    async def close(self) -> None:
        """End everything, in an order in which what is left can still be recorded and sent."""
        await close_all([self.playing, self.loads, *self.hooks.values()], self.reporter.warn)


def _trainer_sends_first(config: Config, addresses: Addresses) -> bool:
    """Return whether the engines get weights of the trainer before the first rollout."""
    attached = addresses.attached and config.mode == "train"
    return bool(addresses.resume or attached or config.changes_base)


def _started_hooks(run: RolloutRun) -> dict[str, RolloutHooks]:
    hooks = {name: one.rollout() for name, one in lookup.active(run.config).items()}
    for one in hooks.values():
        one.start(run)
    return hooks


def _playing(
    run: RolloutRun, hooks: Mapping[str, RolloutHooks], model: ModelParts, tasks: dict[str, Task]
) -> PlaysEpisodes:
    """Return what plays all episodes: what the first extension has for it, or parts of this process."""
    restarts = times_restarted()
    requests = f"r{restarts:03d}-" if restarts else ""  # engines may still have requests of the dead process
    elsewhere = (found for one in hooks.values() if (found := one.plays(run)))
    return next(elsewhere, None) or PlayingParts.build(run.config, run.addresses, model, tasks, run.warn, requests)


def build_buffer(rollout: RolloutConfig, *, overlap: bool) -> ResumableBuffer:
    """Build the buffer that the configuration describes. `overlap` is weights.overlap."""
    return ResumableBuffer(
        rollout.batch_groups,
        rollout.max_staleness,
        rollout.lead,
        oversample=rollout.oversample,
        over_age=rollout.over_age,
        overlap=overlap,
        select=load(rollout.select, "rollout.select"),
    )


def _limiter(run: RolloutRun, hooks: Mapping[str, RolloutHooks]) -> ConcurrencyLimiter:
    """Return the limiter of the setting; for "auto" that of the first extension which has one. Raises
    ConfigError if none has."""
    most = run.config.rollout.max_running_groups
    if most == "auto":
        if limiter := next((found for one in hooks.values() if (found := one.limits(run))), None):
            return limiter
        raise ConfigError("rollout.max_running_groups", most, "No extension limits this run: set a number, or null.")
    return FixedConcurrency(most) if most else ConcurrencyLimiter()


def _snapshot_of(addresses: Addresses, left: Left) -> Snapshot | None:
    """Return the state with which the rollouts go on: that of a process that died, or of the resumed checkpoint."""
    state = left.state or ((addresses.resume / ROLLOUT).read_bytes() if addresses.resume else None)
    return snapshot.decode(state) if state else None


def _began(run: RolloutRun, resumed: Snapshot | None) -> Began:
    """Return the first event of this process."""
    version, number = (resumed.service.buffer.version, resumed.number) if resumed else (0, 0)
    return Began(run.addresses.run_id, time.time(), version, json.loads(run.config.model_dump_json()), number)
