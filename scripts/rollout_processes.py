"""Processes that play episodes against stub engines (processes.count), for scripts/bench_rollout.py: the CPU time of
the process with the buffer for each sample, and of those that play for each request.

The parts are the real ones, with groups of SIZE samples, each of which is a request of its own, and a reward that costs
nothing. Prompts are those of the default run, rendered and tokenized as there. Batches are taken, encoded and published
as fast as they come; every publish holds and releases all requests.

    python scripts/rollout_processes.py URL NUMBER ENGINE TOKENS COALESCE    one of the processes, started by `measure`
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl import lookup
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.agents.template import ChatTemplate
from asyncrl.config import Config
from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.extensions.processes import wire
from asyncrl.extensions.processes.episodes import EpisodeWorker, play_until_closed
from asyncrl.extensions.processes.workers import EpisodeWorkers
from asyncrl.models.catalog import resolve
from asyncrl.network.addresses import Access, Addresses
from asyncrl.network.ports import free_port
from asyncrl.observability.intervals import DECODE, PREFILL
from asyncrl.rollout.episode import EpisodeTimeouts
from asyncrl.rollout.groups import ConcurrencyLimiter
from asyncrl.rollout.parts import PlayingParts, load_tokenizer
from asyncrl.rollout.player import GroupPlayer
from asyncrl.rollout.prompts import Prompts, question_of, render
from asyncrl.rollout.reporters import FailureReporter, RolloutRun
from asyncrl.rollout.snapshot import ResumableBuffer, ResumableGroups
from asyncrl.rollout.timelines import Timelines
from asyncrl.rollout.worker import Worker
from asyncrl.schema import encode
from asyncrl.tasks import Question, Task
from asyncrl.tasks.build import build_all
from asyncrl.tasks.scores import TaskScoreReward

KEY, SIZE, MODEL_LENGTH = "key", 8, 8192


class Free:
    """A task whose score costs nothing, and a template that decodes nothing."""

    inline = True

    def score(self, answer: str, question: dict[str, Any]) -> float:
        return 0.0

    def correct(self, reward: float) -> bool:
        return reward > 0

    def decode(self, token_ids: Sequence[int]) -> str:
        return ""


def parts(engine: str, tokens: int, coalesce: bool, requests: str = "") -> PlayingParts:
    """Return what plays, as the rollout side puts it together."""
    settings: Any = {"max_new_tokens": tokens, "temperature": 1.0, "stop_token_ids": [0], "requests": requests}
    client = GenerationClient(
        GenerateEndpoint(engine, Access(KEY), 600.0),
        ClientSettings(run="bench", retry_timeout=60.0, coalesce=coalesce, **settings),
    )
    template: Any = Free()
    failures = FailureReporter(lambda text, _: print(text, file=sys.stderr))
    (name,) = _config(2).mixture
    scores: Any = {name: TaskScoreReward(template)}
    player = GroupPlayer({name: SingleTurn()}, scores, template, EpisodeTimeouts(600.0, 600.0, None), failures)
    return PlayingParts(client, {}, scores, player, 60.0, lambda text, traceback=None: print(text, traceback or ""))


@cache
def _config(processes: int) -> Config:
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from asyncrl import config
    from asyncrl.launch.compose import find_further_confs

    find_further_confs()
    with initialize_config_dir(version_base=None, config_dir=str(Path(__file__).parent.parent / "conf")):
        composed = compose("train", [f"++processes.count={processes}", "eval.questions=8"])
    values: Any = OmegaConf.to_container(composed, resolve=True)
    return config.load(values)


@cache
def questions(processes: int) -> tuple[Config, dict[str, Task], ChatTemplate]:
    """Return the default run's configuration, its task, and the template of its model."""
    made = _config(processes)
    return made, build_all(made), ChatTemplate(load_tokenizer(resolve(made.model.path), None))


async def measure(
    engines: Sequence[str],
    tokens: int,
    batch: int,
    steps: int,
    *,
    in_flight: bool = False,
    coalesce: bool = False,
    stubs: bool = False,
    record: bool = False,
) -> dict[str, float]:
    """Play batches of `batch` groups, in one process for each of several engines, or in this one for one engine. With
    `coalesce`, siblings share requests; with `in_flight`, all groups that are admitted must be in flight before the
    first batch. With `stubs`, the processes ask no engines (scripts/stub_player.py), and the run may be recorded."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        playing: Any = await _players(engines, tokens, address, coalesce)
        config, built, template = questions(len(engines))
        (name,) = built
        config = config.model_copy(update={"record": record})
        run = RolloutRun(config, addresses(address), folder, warn, built)
        hooks = [one.rollout() for one in lookup.active(config).values()]
        for one in hooks:
            one.start(run)
        timelines = Timelines([one.record for one in hooks])
        groups = ResumableGroups(ResumableBuffer(batch, 2), playing.client, timelines=timelines, hooks=hooks)
        prompts = Prompts(config, built, template, MODEL_LENGTH, ahead=getattr(playing, "ahead", None))
        worker = Worker(
            groups,
            playing.client,
            playing.groups,
            lambda _: prompts.draw({name: 1.0}),
            ConcurrencyLimiter(),
            group_sizes={name: SIZE},
            max_failures=100,
            max_rejections=1000,
        )
        async with asyncio.TaskGroup() as tasks:
            serving = None
            if isinstance(playing, EpisodeWorkers):
                serving = tasks.create_task(playing.serve())
                given = [
                    ("stub_player.py", number, tokens, record)
                    if stubs
                    else (Path(__file__).name, number, engine, tokens, coalesce)
                    for number, engine in enumerate(engines)
                ]
                started = [await _start(script, address, *arguments) for script, *arguments in given]
                await playing.start()
            working = tasks.create_task(worker.run())
            if in_flight:
                found = await _all_in_flight(groups, 3 * batch * SIZE)
            else:
                found = await _steps(groups, playing.client.inflight, tokens, steps)
            working.cancel()
            await playing.close()
            if serving:
                serving.cancel()
            if serving and stubs:
                await asyncio.gather(*[process.wait() for process in started])
            elif serving:
                told = [json.loads((await process.communicate())[0]) for process in started]
                found["worker_cpu_us"] = sum(one["cpu"] for one in told) / sum(one["requests"] for one in told) * 1e6
                found["worker_rss"] = max(one["rss"] for one in told)
        for one in hooks:
            await one.close()
        return found


async def _steps(groups: ResumableGroups, inflight: Any, tokens: int, steps: int) -> dict[str, float]:
    """Take, encode and publish batches. Return the CPU time of this process for each sample, and samples a second, from
    the second batch on."""
    began = cpu = received = size = 0.0
    for version in range(steps):
        data = encode(await groups.batch(version))
        if version == 0:
            began, cpu, received = time.monotonic(), time.process_time(), inflight.tokens["training"]
        size = len(data)
        inflight.hold()
        await inflight.confirmed()
        await groups.published(version + 1)
    samples = (inflight.tokens["training"] - received) / tokens
    return {
        "cpu_us": (time.process_time() - cpu) / samples * 1e6,
        "samples_per_s": samples / (time.monotonic() - began),
        "batch_bytes": size,
    }


async def _all_in_flight(groups: ResumableGroups, count: int) -> dict[str, float]:
    """Wait until so many samples are in flight, and return the share of a core that this process takes for them, and
    its memory."""
    phases = Counter[str]()
    while phases[PREFILL] + phases[DECODE] < count:
        await asyncio.sleep(1.0)
        phases = Counter(one.activity.phase for group in groups.running() for one in group.siblings)
        groups.ledger()
    cpu, began = time.process_time(), time.monotonic()
    await asyncio.sleep(10.0)
    share = (time.process_time() - cpu) / (time.monotonic() - began)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"in_flight": count, "idle_share": share, "rss": rss}


async def _players(engines: Sequence[str], tokens: int, address: str, coalesce: bool) -> PlayingParts | EpisodeWorkers:
    if len(engines) == 1:
        return parts(engines[0], tokens, coalesce)
    run = RolloutRun(_config(len(engines)), addresses(address), Path(), warn)
    return EpisodeWorkers(run, len(engines))


def warn(text: str, traceback: str | None = None) -> None:
    """Print a warning."""
    print(text, file=sys.stderr)


def addresses(url: str) -> Addresses:
    """Return the addresses of a run whose processes connect here."""
    return Addresses("bench", KEY, Path(), (), "", "", 0, 0.0, extensions={"processes": {"url": url}})


async def _start(script: str, address: str, *arguments: str | int) -> asyncio.subprocess.Process:
    told = [str(int(one)) if isinstance(one, bool) else str(one) for one in arguments]
    argv = [str(Path(__file__).with_name(script)), address, *told]
    return await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)


async def connected(address: str, number: int) -> wire.Channel:
    """Connect to the process with the buffer, as the process of this number."""
    while True:
        try:
            channel = await wire.connect(address, Access(KEY))
            break
        except OSError:
            await asyncio.sleep(0.05)
    channel.send(wire.Hello(KEY, number))
    return channel


async def main(address: str, number: int, engine: str, tokens: int, coalesce: bool) -> None:
    """Play until the connection is closed, and print the CPU seconds and the samples."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    playing = parts(engine, tokens, coalesce, f"{number:04d}-")
    config, built, template = questions(2)

    def question(task: str, index: int) -> Question:
        return question_of(built[task], template, index, config.field_of(task))

    channel = await connected(address, number)
    cpu = time.process_time()
    await play_until_closed(channel, EpisodeWorker(channel, playing, question, partial(render, template), record=False))
    found = {
        "cpu": time.process_time() - cpu,
        "requests": max(1.0, playing.client.inflight.tokens["training"] / tokens),
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    await playing.close()
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5] == "1"))
