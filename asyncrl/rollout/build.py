"""The parts of the rollout process: what there is, what each is built of, and what they do together."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl import import_hooks, lookup
from asyncrl.checkpoints.manifest import ROLLOUT
from asyncrl.config import Config
from asyncrl.engine.loads import Loads
from asyncrl.engine.router import wait_until_ready
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import ConfigError, DeadlineExceeded
from asyncrl.extension import RolloutHooks
from asyncrl.jsonl import Tail
from asyncrl.network.addresses import READY, Addresses, times_restarted
from asyncrl.records.events import Began, Event
from asyncrl.records.reading import RECORDS
from asyncrl.records.writer import Writer
from asyncrl.rollout import snapshot
from asyncrl.rollout.agent import close_all
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.curriculum import Mixer
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.rollout.groups import GroupLifecycle, build_buffer
from asyncrl.rollout.journal import Journal, Left, NoJournal
from asyncrl.rollout.limiter import ConcurrencyLimiter, FixedConcurrency
from asyncrl.rollout.observer import Observer
from asyncrl.rollout.parts import ModelParts, PlayingParts, PlaysEpisodes
from asyncrl.rollout.prompts import Prompts
from asyncrl.rollout.recorder import Recorder
from asyncrl.rollout.reporters import RolloutRun, RunReporter
from asyncrl.rollout.server import RolloutServer
from asyncrl.rollout.snapshot import GroupsState, Snapshot
from asyncrl.rollout.status import StatusFile
from asyncrl.rollout.worker import Patience, Worker
from asyncrl.schema import Prompt
from asyncrl.tasks import Task, build_all
from asyncrl.user_code import load

RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class RolloutParts:
    """Everything in the rollout process. It may be `resumed` from a snapshot, when the `outstanding` groups were
    running; the versions `since` were announced later, to a process that died and `left` them."""

    run: RolloutRun
    hooks: Sequence[RolloutHooks]
    reporter: RunReporter
    model: ModelParts
    playing: PlaysEpisodes
    loads: Loads
    observer: Observer
    evaluations: Evaluations
    limiter: ConcurrencyLimiter
    recorder: Recorder
    groups: GroupLifecycle
    worker: Worker
    server: RolloutServer
    status: StatusFile
    resumed: Snapshot | None
    left: Left
    since: range
    outstanding: Sequence[tuple[Ticket, Prompt, Sequence[GenerationSession]]]

    @classmethod
    def build(cls, config: Config, addresses: Addresses, run_dir: Path) -> RolloutParts:
        """Build all of them. What has been built is not running yet."""
        model = ModelParts.load(config, addresses)
        import_hooks.done()
        reporter = RunReporter(run_dir, lambda: playing.client.inflight.version)
        run = RolloutRun(config, addresses, run_dir, reporter.warn)
        journal = _journal(run)
        tasks = build_all(config)
        hooks = _started_hooks(run)
        playing = _playing(run, hooks, model, tasks)
        prompts = _prompts(run, model, tasks, playing)
        mixer = _mixer(config, tasks, prompts)
        loads = Loads(addresses.router, addresses.access, metrics=config.engine.metrics)
        observer = Observer(run, {name: task.correct for name, task in tasks.items()}, hooks)
        evaluations = _evaluations(reporter, run, playing, tasks, prompts, observer)
        limiter = _limiter(run, hooks)
        resumed = _snapshot_of(addresses, journal.left)
        recorder = _recorder(run, hooks, resumed)
        groups = GroupLifecycle(
            build_buffer(config.rollout, overlap=config.weights.overlap),
            playing.client,
            limiter=limiter,
            publish=reporter.publish,
            figures=_figures(playing, prompts, loads, recorder, observer),
            recorder=recorder,
            timelines=observer.timelines,
        )
        server = RolloutServer(
            groups,
            playing.client.inflight,
            evaluations,
            addresses.api_key,
            journal=journal,
            drain=config.weights.pause_mode == "drain",
            save=_save(prompts, mixer, evaluations),
            number=resumed.number if resumed else 0,
        )
        server.starting = "the engines to start"
        status = StatusFile(run_dir, server.state, groups, playing.client.inflight, loads, addresses, observer.gpus)
        server.more = [route for one in hooks for route in one.routes(server, status.now)]
        outstanding = _restored(resumed, groups, prompts, mixer, evaluations) if resumed else []
        since = _announced_since(groups, journal.left)
        return cls(
            run=run,
            hooks=hooks,
            reporter=reporter,
            model=model,
            playing=playing,
            loads=loads,
            observer=observer,
            evaluations=evaluations,
            limiter=limiter,
            recorder=recorder,
            groups=groups,
            worker=_worker(config, groups, playing, mixer, limiter),
            server=server,
            status=status,
            resumed=resumed,
            left=journal.left,
            since=since,
            outstanding=outstanding,
        )

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
            self.observer.ready(self.run.addresses.started_at, "start_up")

    async def roll_out(self) -> None:
        """Wait for the engines, and play until cancelled."""
        config, addresses, inflight = self.run.config, self.run.addresses, self.playing.client.inflight
        async with asyncio.TaskGroup() as working:
            await self.begin(working)
            if _trainer_sends_first(config, addresses):
                await self.groups.released()
            if self.resumed is None:
                await self.evaluations.now()  # has the engines to itself: version 0, before the first rollout
            else:
                since = range(self.since.start, self.groups.published_version + 1)  # also announced meanwhile
                self.evaluations.go_on(self.resumed.evaluated, since, running=self.resumed.evaluating)
            working.create_task(self.worker.run(self.outstanding))
            working.create_task(self.server.keep_regularly())
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
        self.observer.ready(died, "recovery")
        age = f"{died - self.left.written:.1f} s before its death, with {len(self.outstanding)} groups under way"
        at = f"its state {age}" if self.left.state else "its beginning"
        self.reporter.warn(f"the rollout process goes on after {time.time() - died:.0f} s, from {at}")

    async def close(self) -> None:
        """End everything, in an order in which what is left can still be recorded and sent."""
        await close_all([self.playing, self.loads, self.observer, *self.hooks], self.reporter.warn)
        self.recorder.close()


def _trainer_sends_first(config: Config, addresses: Addresses) -> bool:
    """Return whether the engines get weights of the trainer before the first rollout."""
    attached = addresses.attached and config.mode == "train"
    return bool(addresses.resume or attached or config.changes_base or config.cluster.takes_turns)


def _journal(run: RolloutRun) -> NoJournal:
    if not run.config.recovers:
        return NoJournal()
    return Journal(run.run_dir, run.warn, restarted=bool(times_restarted()))


def _started_hooks(run: RolloutRun) -> list[RolloutHooks]:
    hooks = [one.rollout() for one in lookup.active(run.config).values()]
    for one in hooks:
        one.start(run)
    return hooks


def _playing(
    run: RolloutRun, hooks: Sequence[RolloutHooks], model: ModelParts, tasks: dict[str, Task]
) -> PlaysEpisodes:
    """Return what plays all episodes: what the first extension has for it, or parts of this process."""
    restarts = times_restarted()
    requests = f"r{restarts:03d}-" if restarts else ""  # engines may still have requests of the dead process
    elsewhere = (found for one in hooks if (found := one.plays(run)))
    return next(elsewhere, None) or PlayingParts.build(run.config, run.addresses, model, tasks, run.warn, requests)


def _prompts(run: RolloutRun, model: ModelParts, tasks: dict[str, Task], playing: PlaysEpisodes) -> Prompts:
    length = model.hf["max_position_embeddings"]
    return Prompts(run.config, tasks, model.template, length, run.warn, model.vision, playing.ahead)


def _mixer(config: Config, tasks: dict[str, Task], prompts: Prompts) -> Mixer:
    return Mixer(
        tasks,
        prompts.training,
        {name: task.weight for name, task in config.mixture.items()},
        load(config.rollout.curriculum, "rollout.curriculum"),
        config.run.seed,
    )


def _evaluations(
    reporter: RunReporter,
    run: RolloutRun,
    playing: PlaysEpisodes,
    tasks: dict[str, Task],
    prompts: Prompts,
    observer: Observer,
) -> Evaluations:
    return Evaluations(
        playing.attempts,
        playing.client,
        tasks,
        prompts.held_out,
        run.config.eval,
        reporter.evaluated,
        observer.timelines,
        Tail(run.run_dir / "eval.jsonl")() if times_restarted() else (),
    )


def _limiter(run: RolloutRun, hooks: Sequence[RolloutHooks]) -> ConcurrencyLimiter:
    """Return the limiter of the setting; for "auto" that of the first extension which has one. Raises
    ConfigError if none has."""
    most = run.config.rollout.max_running_groups
    if most == "auto":
        if limiter := next((found for one in hooks if (found := one.limits(run))), None):
            return limiter
        raise ConfigError("rollout.max_running_groups", most, "Install an extension for it, or set a number or null.")
    return FixedConcurrency(most) if most else ConcurrencyLimiter()


def _snapshot_of(addresses: Addresses, left: Left) -> Snapshot | None:
    """Return the state with which the rollouts go on: that of a process that died, or of the resumed checkpoint."""
    state = left.state or ((addresses.resume / ROLLOUT).read_bytes() if addresses.resume else None)
    return snapshot.decode(state) if state else None


def _recorder(run: RolloutRun, hooks: Sequence[RolloutHooks], resumed: Snapshot | None) -> Recorder:
    config, writer = run.config, Writer[Event](run.run_dir / RECORDS) if run.config.record else None
    if writer:
        version, number = (resumed.service.buffer.version, resumed.number) if resumed else (0, 0)
        writer.write(Began(run.addresses.run_id, time.time(), version, json.loads(config.model_dump_json()), number))
    return Recorder(writer, run.warn, [one.group for one in hooks])


def _figures(
    playing: PlaysEpisodes, prompts: Prompts, loads: Loads, recorder: Recorder, observer: Observer
) -> Callable[[], dict[str, float]]:
    """Return what takes the figures of all parts for a batch."""

    def figures() -> dict[str, float]:
        more = ChainMap(playing.take_played(), prompts.figures(), loads.figures())
        return {**recorder.take_figures(), **observer.take_figures(), **more}

    return figures


def _save(prompts: Prompts, mixer: Mixer, evaluations: Evaluations) -> Callable[[GroupsState, int], bytes]:
    """Return what encodes a snapshot with the state of the groups, and its number."""

    def save(state: GroupsState, number: int) -> bytes:
        evaluation = evaluations.under_way, evaluations.evaluated
        return snapshot.encode(Snapshot(state, prompts.cursor(), mixer.state(), *evaluation, number))

    return save


def _worker(
    config: Config, groups: GroupLifecycle, playing: PlaysEpisodes, mixer: Mixer, limiter: ConcurrencyLimiter
) -> Worker:
    return Worker(
        groups,
        playing.client,
        playing.groups,
        mixer,
        limiter,
        Patience(config.rollout.max_failures, config.rollout.max_rejections),
        group_sizes={name: config.group_size(name) for name in config.mixture},
    )


def _restored(
    resumed: Snapshot, groups: GroupLifecycle, prompts: Prompts, mixer: Mixer, evaluations: Evaluations
) -> list[tuple[Ticket, Prompt, Sequence[GenerationSession]]]:
    """Put the parts into the state of the snapshot, and return the groups that were running."""
    evaluations.ready.clear()
    prompts.go_on(resumed.cursor)
    mixer.restore(resumed.mixer)
    outstanding = []
    for group in groups.restore(resumed.service):
        name = group.prompt
        outstanding.append((group.ticket, prompts.again(name.uid, name.task, name.index), group.siblings))
    return outstanding


def _announced_since(groups: GroupLifecycle, left: Left) -> range:
    """Go on from the version that a process that died has announced last. Return those that its state lacks."""
    version = groups.published_version
    if not left.state and left.served is None:
        return range(version + 1, version + 1)
    return groups.go_on(version if left.served is None else left.served, held=left.held)
