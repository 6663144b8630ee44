"""Entry point of the rollout process: python -m asyncrl.rollout RUN_DIR. Wires up all of its components."""

from __future__ import annotations

from asyncrl import importing

# isort: split
import asyncio
import json
import signal
import sys
import time
from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl import extension
from asyncrl.checkpoints.manifest import ROLLOUT
from asyncrl.config import Config, read
from asyncrl.config.server_args import draft_room
from asyncrl.engine.loads import Loads
from asyncrl.engine.router import wait_until_ready
from asyncrl.engine.session import GenerationSession
from asyncrl.imports import load
from asyncrl.network.addresses import READY, Addresses
from asyncrl.network.tls import signed
from asyncrl.progress import Progress, failing
from asyncrl.records.events import Began, Event
from asyncrl.records.reading import RECORDS, Recording
from asyncrl.records.writer import Writer
from asyncrl.rollout import snapshot
from asyncrl.rollout.agent import close_all
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.compare import ComparingRecorder
from asyncrl.rollout.concurrency import ConcurrencyWindow
from asyncrl.rollout.curriculum import Mixer
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.rollout.groups import GroupLifecycle, build_buffer
from asyncrl.rollout.journal import Journal
from asyncrl.rollout.limiter import AdaptiveConcurrency, ConcurrencyLimiter, FixedConcurrency
from asyncrl.rollout.observer import Observer
from asyncrl.rollout.parts import ModelParts, PlayingParts
from asyncrl.rollout.prompts import Prompts
from asyncrl.rollout.recorder import Recorder
from asyncrl.rollout.reporters import RunReporter, Warn
from asyncrl.rollout.server import RolloutServer, contain, serve
from asyncrl.rollout.snapshot import Snapshot
from asyncrl.rollout.status import StatusFile
from asyncrl.rollout.worker import Patience, Worker
from asyncrl.rollout.workers import EpisodeWorkers
from asyncrl.schema import Prompt
from asyncrl.tasks import Task, build_all


async def main(run_dir: Path) -> None:
    """Serve until the launcher sends SIGTERM or a component fails."""
    contain(asyncio.get_running_loop())
    config, addresses = read(run_dir), Addresses.read(run_dir)
    progress = Progress(run_dir, "rollout", config.cluster.stall_timeout)
    progress.doing("starting", within=config.rollout.batch_timeout)
    progress.watch()
    model = ModelParts.load(config, addresses)
    importing.done()
    reporter = RunReporter(run_dir, lambda: client.inflight.version)
    tasks = build_all(config)
    playing = _playing(config, addresses, model, tasks, reporter.warn)
    client: Any = playing.client
    length = model.hf["max_position_embeddings"]
    ahead = playing.ahead if isinstance(playing, EpisodeWorkers) else None
    prompts = Prompts(config, tasks, model.template, length, reporter.warn, model.vision, ahead)
    rollout, loads = config.rollout, Loads(addresses.router, addresses.access, metrics=config.engine.metrics)
    mixer = _mixer(config, tasks, prompts)
    correct = {name: task.correct for name, task in tasks.items()}
    hooks = [one.rollout() for one in extension.active(config).values()]
    observer = Observer(config, addresses, run_dir, reporter.warn, correct, hooks)
    evaluations = Evaluations(
        *(playing.attempts, client, tasks, prompts.held_out, config.eval, reporter.evaluated, observer.timelines)
    )
    limiter = _concurrency_limiter(config)
    writer, resumed = _writer(config, run_dir), _resumed(addresses)
    recorder = _recorder(writer, config, addresses, reporter, resumed.service.buffer.version if resumed else 0)
    groups = GroupLifecycle(
        build_buffer(rollout, overlap=config.weights.overlap),
        client,
        limiter=limiter,
        publish=reporter.publish,
        figures=lambda: {
            **_taken(recorder, observer),
            **dict(ChainMap(playing.take_played(), prompts.figures(), loads.figures())),
        },
        recorder=recorder,
        timelines=observer.timelines,
    )
    sizes = {name: config.group_size(name) for name in config.mixture}
    patience = Patience(rollout.max_failures, rollout.max_rejections)
    worker = Worker(groups, client, playing.groups, mixer, limiter, patience, group_sizes=sizes)
    server = RolloutServer(
        groups,
        client.inflight,
        evaluations,
        addresses.api_key,
        journal=Journal(run_dir, reporter.warn) if config.recovers else None,
        drain=config.weights.pause_mode == "drain",
        receive=observer.receive,
        save=lambda state: snapshot.encode(Snapshot(state, prompts.cursor(), mixer.state(), evaluations.under_way)),
        metrics=observer.exposed.render,
    )
    server.starting = "the engines to start"
    status = StatusFile(run_dir, server.state, groups, client.inflight, loads, addresses, observer.gpus)
    observer.exposed.now = status.now
    outstanding = _go_on(resumed, groups, prompts, mixer) if resumed else []

    async def roll_out() -> None:
        async with asyncio.TaskGroup() as working:
            working.create_task(status.follow())
            if isinstance(playing, EpisodeWorkers):
                working.create_task(playing.serve(run_dir, addresses.episodes))
            timeout, alone = config.engine.start_timeout, config.mode == "rollout_only"
            await wait_until_ready(
                addresses, timeout, attached=alone, tell=lambda text: setattr(server, "starting", text)
            )
            for engine in await loads.ask() if model.cache is None else ():  # what fits may be less than the context
                client.narrow(int(engine.longest) - draft_room(config.engine))
            server.starting = "extensions, agents and environments to start"
            await playing.start()
            server.starting = ""
            _ready(run_dir, observer, addresses)
            if _trainer_sends_first(config, addresses):
                await groups.released()
            if resumed is None:
                await evaluations.now()  # has the engines to itself: version 0, before the first rollout
            elif resumed.evaluating:
                evaluations.begin()
            working.create_task(worker.run(outstanding))
            if isinstance(limiter, AdaptiveConcurrency):
                working.create_task(
                    limiter.watch(loads.ask, client.inflight.take_needed, lambda: client.inflight.holding)
                )

    following = asyncio.create_task(progress.follow())
    try:
        with failing(run_dir, "rollout"):
            await serve(server, addresses.rollout, roll_out(), signed(run_dir, addresses.rollout))
    finally:
        following.cancel()
        progress.doing("ending", within=config.cluster.stop_grace)
        await close_all([playing, loads, *hooks], reporter.warn)
        observer.close()
        if writer:
            writer.close()


def _playing(
    config: Config, addresses: Addresses, model: ModelParts, tasks: dict[str, Task], warn: Warn
) -> PlayingParts | EpisodeWorkers:
    """Return what plays the episodes: parts of this process, or other processes."""
    if config.rollout.processes > 1:
        return EpisodeWorkers(config, addresses, warn)
    return PlayingParts.build(config, addresses, model, tasks, warn)


def _ready(run_dir: Path, observer: Observer, addresses: Addresses) -> None:
    """Tell the other processes that everything has started."""
    (run_dir / READY).touch()
    observer.ready(addresses.started_at)


def _taken(*parts: Recorder | Observer) -> dict[str, float]:
    """Return what these parts counted since the last batch."""
    return {name: value for part in parts for name, value in part.take_figures().items()}


def _writer(config: Config, run_dir: Path) -> Writer[Event] | None:
    return Writer(run_dir / RECORDS) if config.record else None


def _resumed(addresses: Addresses) -> Snapshot | None:
    return snapshot.decode((addresses.resume / ROLLOUT).read_bytes()) if addresses.resume else None


def _trainer_sends_first(config: Config, addresses: Addresses) -> bool:
    """Return whether the engines get weights of the trainer before the first rollout."""
    attached = addresses.attached and config.mode == "train"
    return bool(addresses.resume or attached or config.changes_base or config.cluster.takes_turns)


def _go_on(
    resumed: Snapshot, groups: GroupLifecycle, prompts: Prompts, mixer: Mixer
) -> list[tuple[Ticket, Prompt, Sequence[GenerationSession]]]:
    """Restore the checkpointed state and return the groups that were running when it was saved."""
    prompts.go_on(resumed.cursor)
    mixer.restore(resumed.mixer)
    return [
        (ticket, prompts.again(name.uid, name.task, name.index), sessions)
        for ticket, name, sessions in groups.restore(resumed.service)
    ]


def _recorder(
    writer: Writer | None, config: Config, addresses: Addresses, reporter: RunReporter, version: int
) -> Recorder:
    if writer:
        writer.write(Began(addresses.run_id, time.time(), version, json.loads(config.model_dump_json())))
    if compared := config.replay.compare:
        recording = Recording(Path(compared).expanduser())
        return ComparingRecorder(recording, reporter.compared, writer, reporter.warn)
    return Recorder(writer, reporter.warn)


def _concurrency_limiter(config: Config) -> ConcurrencyLimiter:
    rollout = config.rollout
    if rollout.max_running_groups == "auto":
        named = {config.agent, *(task.agent for task in config.mixture.values())} - {None}
        programs = any(getattr(load(name, "agent"), "runs_programs", False) for name in named if name)
        return AdaptiveConcurrency(ConcurrencyWindow(rollout.max_new_tokens), programs=programs)
    return FixedConcurrency(rollout.max_running_groups) if rollout.max_running_groups else ConcurrencyLimiter()


def _mixer(config: Config, tasks: dict[str, Task], prompts: Prompts) -> Mixer:
    return Mixer(
        tasks,
        prompts.training,
        {name: task.weight for name, task in config.mixture.items()},
        load(config.rollout.curriculum, "rollout.curriculum"),
        config.run.seed,
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher ends them in order
    with failing(Path(sys.argv[1]), "rollout"):
        asyncio.run(main(Path(sys.argv[1])))
