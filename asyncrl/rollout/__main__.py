"""Entry point of the rollout process: python -m asyncrl.rollout RUN_DIR. Wires up all of its components."""

from __future__ import annotations

from asyncrl import importing

# isort: split
import asyncio
import json
import os
import signal
import sys
import time
from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.agents.template import ChatTemplate
from asyncrl.checkpoints.manifest import ROLLOUT
from asyncrl.config import Config, RolloutConfig, cache_tokens, on_gpu, read
from asyncrl.engine.adapters import adapter_names
from asyncrl.engine.client import GenerationClient
from asyncrl.engine.loads import Loads
from asyncrl.engine.router import wait_until_healthy, wait_until_ready
from asyncrl.engine.scorer import TeacherEngines
from asyncrl.engine.session import GenerationSession
from asyncrl.envs.tools.shared import close_shared
from asyncrl.images.decoder import Vision
from asyncrl.imports import load
from asyncrl.models.architectures import routing_shape
from asyncrl.models.vision import flat
from asyncrl.network.addresses import READY, Access, Addresses
from asyncrl.network.tls import signed
from asyncrl.progress import Progress
from asyncrl.records.events import Began, Event
from asyncrl.records.reading import RECORDS, Recording
from asyncrl.records.writer import Writer
from asyncrl.rollout import snapshot
from asyncrl.rollout.agent import agents, each, figures
from asyncrl.rollout.buffer import build_buffer
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.compare import Comparison
from asyncrl.rollout.concurrency import ConcurrencyWindow
from asyncrl.rollout.curriculum import Mixer
from asyncrl.rollout.episode import EpisodeTimeouts
from asyncrl.rollout.evaluation import Evaluations
from asyncrl.rollout.groups import GroupLifecycle
from asyncrl.rollout.limiter import AdaptiveConcurrency, ConcurrencyLimiter, FixedConcurrency, UnboundedConcurrency
from asyncrl.rollout.observer import Observer, trace_header
from asyncrl.rollout.player import EpisodePlayer
from asyncrl.rollout.prompts import Prompts, load_tokenizer, stop_tokens
from asyncrl.rollout.recorder import Recorder, WritingRecorder
from asyncrl.rollout.reporters import FailureReporter, RunReporter
from asyncrl.rollout.server import RolloutServer, contain, serve
from asyncrl.rollout.snapshot import Snapshot
from asyncrl.rollout.status import StatusFile
from asyncrl.rollout.teacher import TeacherScorer
from asyncrl.rollout.vision import vision_of
from asyncrl.rollout.worker import Patience, Worker
from asyncrl.schema import Prompt
from asyncrl.tasks import Task, build_all
from asyncrl.tasks.scores import rewards

TEACHER_KEY = "ASYNCRL_TEACHER_API_KEY"


async def main(run_dir: Path) -> None:
    """Serve until the launcher sends SIGTERM or a component fails."""
    contain(asyncio.get_running_loop())
    config, addresses = read(run_dir), Addresses.read(run_dir)
    progress = Progress(run_dir, "rollout", config.cluster.stall_timeout)
    progress.doing("starting", within=config.rollout.batch_timeout)
    progress.watch()
    tasks = build_all(config)
    tokenizer = load_tokenizer(addresses.model, config.model.chat_template)
    importing.done()
    template = ChatTemplate(tokenizer)
    hf = flat(json.loads((addresses.model / "config.json").read_text()))
    vision = vision_of(addresses.model, hf, config.rollout.images)
    prompts = Prompts(config, tasks, template, hf["max_position_embeddings"], RunReporter(run_dir).warn, vision)
    cache = cache_tokens(config.engine, gpu=on_gpu(config.engine, addresses.gpus))
    client = _client(config, addresses, stop_tokens(addresses.model, tokenizer), hf, cache, vision)
    rollout, loads = config.rollout, Loads(addresses.router, addresses.access, metrics=config.engine.metrics)
    teachers = _teacher_engines(config, addresses)
    teacher = TeacherScorer(teachers) if teachers else None
    reporter = RunReporter(run_dir, lambda: client.inflight.version)
    players, scores = agents(config, tasks, reporter.warn), rewards(config, tasks)
    mixer = _mixer(config, tasks, prompts)
    failures = FailureReporter(reporter.warn)
    timeouts = EpisodeTimeouts(rollout.agent_timeout, rollout.reward_timeout, rollout.episode_timeout)
    player = EpisodePlayer(players, scores, template, timeouts, failures, retries=rollout.retries, teacher=teacher)
    correct = {name: task.correct for name, task in tasks.items()}
    observer = Observer(config, addresses, run_dir, reporter.warn, correct)
    evaluations = Evaluations(
        *(player.play, client, tasks, prompts.held_out, config.eval, reporter.evaluated, observer.timelines)
    )
    limiter = _concurrency_limiter(rollout)
    writer, resumed = _writer(config, run_dir), _resumed(addresses)
    recorder = _recorder(writer, config, addresses, reporter, resumed.service.buffer.version if resumed else 0)
    groups = GroupLifecycle(
        build_buffer(rollout),
        client,
        limiter=limiter,
        publish=reporter.publish,
        figures=lambda: {
            **_taken(teacher, recorder, player, observer),
            **dict(ChainMap(figures(players.values()), prompts.figures(), loads.figures())),
        },
        recorder=recorder,
        timelines=observer.timelines,
    )
    worker = Worker(groups, client, player, mixer, limiter, failures, **_rules(config))
    server = RolloutServer(
        groups,
        client.inflight,
        evaluations,
        addresses.api_key,
        drain=config.weights.pause_mode == "drain",
        receive=observer.receive,
        save=lambda state: snapshot.encode(Snapshot(state, prompts.cursor(), mixer.state(), evaluations.under_way)),
        metrics=observer.exposed.render,
    )
    status = StatusFile(run_dir, server.state, groups, client.inflight, loads, addresses, observer.gpus)
    observer.exposed.now = status.now
    outstanding = _go_on(resumed, groups, prompts, mixer) if resumed else []

    async def roll_out() -> None:
        async with asyncio.TaskGroup() as working:
            working.create_task(status.follow())
            await _until_ready(config, addresses, teachers)
            for engine in await loads.ask() if cache is None else ():  # what fits on a GPU may be less than the context
                client.narrow(int(engine.capacity) - config.engine.draft_room)
            await each(players.values(), "start")
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
        await serve(server, addresses.rollout, roll_out(), signed(run_dir, addresses.rollout))
    finally:
        following.cancel()
        progress.doing("ending", within=config.cluster.stop_grace)
        await each([*players.values(), *scores.values()], "close")
        await close_shared()
        await each([client, loads, teachers], "close")
        observer.close()
        if writer:
            writer.close()


def _rules(config: Config) -> dict[str, Any]:
    """Return the settings of the worker."""
    return {
        "patience": Patience(config.rollout.max_failures, config.rollout.max_rejections),
        "group_sizes": {name: config.group_size(name) for name in config.mixture},
        "accept": load(config.rollout.accept, "rollout.accept"),
    }


async def _until_ready(config: Config, addresses: Addresses, teachers: TeacherEngines | None) -> None:
    """Wait until the engines of the policy, the teacher and the judge can answer."""
    timeout = config.engine.start_timeout
    await wait_until_ready(addresses, timeout, attached=config.mode == "rollout_only")
    if teachers:
        await teachers.wait_until_ready(timeout)
    await wait_until_healthy(addresses.judges, addresses.access, timeout, "the judge's engines")


def _ready(run_dir: Path, observer: Observer, addresses: Addresses) -> None:
    """Tell the other processes that everything has started."""
    (run_dir / READY).touch()
    observer.ready(addresses.started_at)


def _taken(*parts: TeacherScorer | Recorder | EpisodePlayer | Observer | None) -> dict[str, float]:
    """Return what these parts counted since the last batch."""
    return {name: value for part in parts if part for name, value in part.take_figures().items()}


def _writer(config: Config, run_dir: Path) -> Writer[Event] | None:
    return Writer(run_dir / RECORDS) if config.record else None


def _resumed(addresses: Addresses) -> Snapshot | None:
    return snapshot.decode((addresses.resume / ROLLOUT).read_bytes()) if addresses.resume else None


def _trainer_sends_first(config: Config, addresses: Addresses) -> bool:
    """Return whether the engines get weights of the trainer before the first rollout."""
    attached = addresses.attached and config.mode == "train"
    return bool(addresses.resume or attached or config.changes_base or config.cluster.placement == "colocated")


def _client(
    config: Config,
    addresses: Addresses,
    stop_token_ids: list[int],
    hf: dict[str, Any],
    cache: int | None,
    vision: Vision | None,
) -> GenerationClient:
    context = int(config.engine.server_args.get("context_length") or hf["max_position_embeddings"])
    return GenerationClient(
        addresses.router,
        run=addresses.run_id,
        access=addresses.access,
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        stop_token_ids=stop_token_ids,
        timeout=config.engine.request_timeout,
        retry_timeout=config.engine.retry_timeout,
        # the stock server cannot unload an adapter after a request with several samples (engine/unloading.py)
        coalesce=config.rollout.coalesce and not (config.serves_adapters and addresses.attached),
        cache_key=config.rollout.cache_key,
        pause_mode=config.weights.pause_mode,
        fields=config.engine.request_fields,
        routing=routing_shape(hf) if config.algo.routing_replay == "R3" else None,
        seed=config.run.seed if config.deterministic else None,
        context=min(context, cache - config.engine.draft_room if cache else context),
        names=adapter_names(config, addresses.run_id),
        adapter_per=config.rollout.adapter_per,
        agents=config.agents,
        past_versions=config.past_versions,
        vision=vision,
        trace=trace_header(config, addresses),
    )


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


def _teacher_engines(config: Config, addresses: Addresses) -> TeacherEngines | None:
    """Return None without a teacher. External engines (teacher.urls) have their own API key, from the environment: no
    file of the run stores it."""
    if not addresses.teachers:
        return None
    teacher = config.teacher
    return TeacherEngines(
        addresses.teachers,
        access=Access(os.environ.get(TEACHER_KEY, "")) if teacher.urls else addresses.access,
        max_running=teacher.max_running,
        request_timeout=teacher.request_timeout,
        retry_timeout=teacher.retry_timeout,
    )


def _recorder(
    writer: Writer | None, config: Config, addresses: Addresses, reporter: RunReporter, version: int
) -> Recorder:
    recorder = Recorder()
    if writer:
        writer.write(Began(addresses.run_id, time.time(), version, json.loads(config.model_dump_json())))
        recorder = WritingRecorder(writer, reporter.warn)
    if compared := config.replay.compare:
        recorder = Comparison(Recording(Path(compared).expanduser()), reporter.compared, recorder)
    return recorder


def _concurrency_limiter(rollout: RolloutConfig) -> ConcurrencyLimiter:
    if rollout.max_running_groups == "auto":
        return AdaptiveConcurrency(ConcurrencyWindow(rollout.max_new_tokens))
    return FixedConcurrency(rollout.max_running_groups) if rollout.max_running_groups else UnboundedConcurrency()


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
    asyncio.run(main(Path(sys.argv[1])))
