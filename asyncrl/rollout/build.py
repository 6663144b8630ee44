"""The parts of the rollout process: what there is, what each is built of, and what they do together."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl import extension, import_hooks
from asyncrl.checkpoints.manifest import ROLLOUT
from asyncrl.config import Config
from asyncrl.engine.loads import Loads
from asyncrl.engine.router import wait_until_ready
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import DeadlineExceeded
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
        rollout = config.rollout
        model = ModelParts.load(config, addresses)
        import_hooks.done()
        reporter = RunReporter(run_dir, lambda: playing.client.inflight.version)
        restarted = bool(times_restarted())
        journal = Journal(run_dir, reporter.warn, restarted=restarted) if config.recovers else NoJournal()
        run = RolloutRun(config, addresses, run_dir, reporter.warn)
        tasks = build_all(config)
        hooks = [one.rollout() for one in extension.active(config).values()]
        for one in hooks:
            one.start(run)
        elsewhere = (found for one in hooks if (found := one.plays(run)))
        named = f"r{times_restarted():03d}-" if restarted else ""  # engines may still have requests of the dead one
        playing = next(elsewhere, None) or PlayingParts.build(config, addresses, model, tasks, run.warn, named)
        client, inflight = playing.client, playing.client.inflight
        length = model.hf["max_position_embeddings"]
        prompts = Prompts(config, tasks, model.template, length, reporter.warn, model.vision, playing.ahead)
        loads = Loads(addresses.router, addresses.access, metrics=config.engine.metrics)
        mixer = _mixer(config, tasks, prompts)
        observer = Observer(run, {name: task.correct for name, task in tasks.items()}, hooks)
        evaluations = Evaluations(
            playing.attempts,
            client,
            tasks,
            prompts.held_out,
            config.eval,
            reporter.evaluated,
            observer.timelines,
            Tail(run_dir / "eval.jsonl")() if restarted else (),
        )
        limiter = _limiter(run, hooks)
        left = journal.left
        state = left.state or ((addresses.resume / ROLLOUT).read_bytes() if addresses.resume else None)
        resumed = snapshot.decode(state) if state else None
        recorder = _recorder(run, hooks, resumed)

        def figures() -> dict[str, float]:
            more = ChainMap(playing.take_played(), prompts.figures(), loads.figures())
            return {**recorder.take_figures(), **observer.take_figures(), **more}

        def save(state: GroupsState, number: int) -> bytes:
            evaluation = evaluations.under_way, evaluations.evaluated
            return snapshot.encode(Snapshot(state, prompts.cursor(), mixer.state(), *evaluation, number))

        groups = GroupLifecycle(
            build_buffer(rollout, overlap=config.weights.overlap),
            client,
            limiter=limiter,
            publish=reporter.publish,
            figures=figures,
            recorder=recorder,
            timelines=observer.timelines,
        )
        worker = Worker(
            groups,
            client,
            playing.groups,
            mixer,
            limiter,
            Patience(rollout.max_failures, rollout.max_rejections),
            group_sizes={name: config.group_size(name) for name in config.mixture},
        )
        drain = config.weights.pause_mode == "drain"
        server = RolloutServer(
            groups,
            inflight,
            evaluations,
            addresses.api_key,
            journal=journal,
            drain=drain,
            save=save,
            number=resumed.number if resumed else 0,
        )
        server.starting = "the engines to start"
        status = StatusFile(run_dir, server.state, groups, inflight, loads, addresses, observer.gpus)
        server.more = [route for one in hooks for route in one.routes(server, status.now)]
        outstanding = []
        if resumed:
            evaluations.ready.clear()
            prompts.go_on(resumed.cursor)
            mixer.restore(resumed.mixer)
            for group in groups.restore(resumed.service):
                name = group.prompt
                outstanding.append((group.ticket, prompts.again(name.uid, name.task, name.index), group.siblings))
        served, version = left.served, groups.published_version
        since = range(version + 1, version + 1)
        if left.state or served is not None:
            since = groups.go_on(version if served is None else served, held=left.held)
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
            worker=worker,
            server=server,
            status=status,
            resumed=resumed,
            left=left,
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


def _recorder(run: RolloutRun, hooks: Sequence[RolloutHooks], resumed: Snapshot | None) -> Recorder:
    config, writer = run.config, Writer[Event](run.run_dir / RECORDS) if run.config.record else None
    if writer:
        version, number = (resumed.service.buffer.version, resumed.number) if resumed else (0, 0)
        writer.write(Began(run.addresses.run_id, time.time(), version, json.loads(config.model_dump_json()), number))
    return Recorder(writer, run.warn, [one.group for one in hooks])


def _limiter(run: RolloutRun, hooks: Sequence[RolloutHooks]) -> ConcurrencyLimiter:
    """Return the limiter of the setting; for "auto" that of the first extension which has one."""
    most = run.config.rollout.max_running_groups
    if most == "auto":
        return next((found for one in hooks if (found := one.limits(run))), ConcurrencyLimiter())
    return FixedConcurrency(most) if most else ConcurrencyLimiter()


def _mixer(config: Config, tasks: dict[str, Task], prompts: Prompts) -> Mixer:
    return Mixer(
        tasks,
        prompts.training,
        {name: task.weight for name, task in config.mixture.items()},
        load(config.rollout.curriculum, "rollout.curriculum"),
        config.run.seed,
    )
