"""A process that plays episodes: python -m asyncrl.extensions.processes.episodes RUN_DIR NUMBER.

It holds the connections to the engines, the agents, environments and rewards, and hands whole groups to the rollout
process, which has the buffer and the ledger (workers.py). It decides nothing: which group it plays, and when
requests are held back, it is told.

waits for     the rollout process; the episodes, which have timeouts
on death      of the rollout process: ends, as having lost its peer. An error of ours is sent there, and ends the run
"""

from __future__ import annotations

from asyncrl import import_hooks

# isort: split
import asyncio
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config import read
from asyncrl.engine.session import GenerationSession
from asyncrl.errors import AsyncRLError, EpisodeFailed, described, first_of
from asyncrl.extensions.processes import wire
from asyncrl.extensions.recording.events import compressed
from asyncrl.network.addresses import PEER_FAILED, Addresses
from asyncrl.progress import Progress, failing
from asyncrl.rollout.parts import ModelParts, PlayingParts
from asyncrl.rollout.prompts import question_of, render
from asyncrl.rollout.serving import contain
from asyncrl.schema import Prompt, Trajectory, encode
from asyncrl.tasks import Question
from asyncrl.tasks.build import build_all

REPORT_SECONDS, REPORT_SHARE = 1.0, 0.02
"""Seconds between two reports, and the largest share of the time that they may take."""
CONNECT_SECONDS = 0.2
LAST_SECONDS = 1.0
"""Seconds between the end of the connection and that of this process: the launcher is to see first how the rollout
process ends."""


class EpisodeWorker:
    """Does what the rollout process says."""

    def __init__(
        self,
        channel: wire.Channel,
        parts: PlayingParts,
        question: Callable[[str, int], Question],
        render: Callable[[Question], list[int]],
        *,
        record: bool,
    ) -> None:
        """`question` returns a question of a task, `render` its tokens; `record` says that the run is recorded."""
        self._channel, self._parts, self._record = channel, parts, record
        self._question, self._render = question, render
        self._playing: dict[str, tuple[wire.Play, Sequence[GenerationSession], asyncio.Task[None]]] = {}
        self._stopped: set[str] = set()

    async def run(self) -> None:
        """Follow the commands until the connection ends. Raises ConnectionError."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._report_regularly())
            while True:
                await self._follow(await self._channel.receive(), tasks)

    async def _follow(self, command: Any, tasks: asyncio.TaskGroup) -> None:
        flight = self._parts.client.inflight
        match command:
            case wire.Play():
                sessions = [self._session(command, sample) for sample in command.samples]
                task = tasks.create_task(self._play(command, sessions))
                self._playing[command.group] = command, sessions, task
            case wire.Stop():
                if command.group in self._playing:
                    self._stopped.add(command.group)
                    self._playing[command.group][2].cancel()
            case wire.Render():
                tasks.create_task(self._render_all(command.questions))
            case wire.Narrow():
                self._parts.client.narrow(command.context)
            case wire.Drain():
                tasks.create_task(self._drain(command.number))
            case wire.Begin():
                if command.context is not None:
                    self._parts.client.narrow(command.context)
                flight.version = command.version
                if command.holding:
                    flight.hold()
                await self._parts.start()
                self._report(command.number)
            case wire.Hold():
                flight.hold()
                self._report(command.number)
            case wire.Release():
                flight.release(command.version)
                self._report(command.number)
            case wire.Save():
                self._report(command.number, save=True)
                await self._channel.drain()

    async def _drain(self, number: int) -> None:
        while not await self._parts.client.inflight.drained(REPORT_SECONDS):
            pass
        self._report(number)

    # -- groups ---------------------------------------------------------------------------------------------

    def _session(self, play: wire.Play, sample: wire.SampleToPlay) -> GenerationSession:
        client = self._parts.client
        if play.ticket is None:
            named = {"group": play.group, "sample": sample.name, "pinned": play.pinned, "born": play.born}
            return client.generate(sample.temperature, purpose="evaluation", **named)  # type: ignore[arg-type]
        session = client.generate(group=play.group, sample=sample.name, born=play.born)
        if sample.received:
            session.restore(sample.received, sample.said)
        return session

    async def _play(self, play: wire.Play, sessions: Sequence[GenerationSession]) -> None:
        answer: wire.WireMessage
        try:
            question = self._question(play.task, play.index)
            if not play.images and self._render(question) != play.token_ids:
                text = f"question({play.index}) of {play.task} is another one in each process"
                raise AsyncRLError(f"{text}: the same index must always give the same question (processes.count)")
            prompt = Prompt(play.prompt, play.token_ids, question, play.task, play.index, play.images)
            if play.ticket is None:
                attempts = await self._parts.groups.attempts(prompt, sessions)
                told = [one if isinstance(one, Trajectory) else str(one) for one in attempts]
                answer = wire.Answered(play.group, self._ended(play, sessions), told)
            else:
                group, verdict = await self._parts.groups.play(play.ticket, prompt, sessions)
                content = compressed(group) if self._record else None
                figures = verdict, group.lengths, group.rewards, encode(group), content
                answer = wire.Finished(play.group, self._ended(play, sessions), *figures)
        except EpisodeFailed as failed:
            answer = wire.Failed(play.group, self._ended(play, sessions), failed.reason, failed.located)
        except asyncio.CancelledError:
            if play.group not in self._stopped:
                raise
            answer = wire.Failed(play.group, self._ended(play, sessions), "stopped", "")
        self._channel.send(answer)
        await self._channel.drain()

    async def _render_all(self, questions: list[tuple[str, int]]) -> None:
        """Render questions, with turns of the event loop in between. The rollout process renders, and reports, those
        that fail here."""
        found = []
        for task, index in questions:
            with suppress(AsyncRLError):
                tokens = self._render(self._question(task, index))
                found.append(wire.RenderedQuestion(task, index, msgspec.Raw(encode(tokens))))
            await asyncio.sleep(0)
        self._channel.send(wire.Rendered(found))

    def _ended(self, play: wire.Play, sessions: Sequence[GenerationSession]) -> list[wire.EndedEpisode]:
        """Close the sessions of a group, and return what became of its episodes. Nothing is awaited until they are
        sent, because the next report is without them."""
        del self._playing[play.group]
        self._stopped.discard(play.group)
        if play.ticket:
            for session in sessions:
                session.close()
        now = time.time()
        return [wire.EndedEpisode(one.received, one.activity.began, one.activity.intervals(now)) for one in sessions]

    # -- reports --------------------------------------------------------------------------------------------

    async def _report_regularly(self) -> None:
        while True:
            began = time.thread_time()
            self._report()
            await self._channel.drain()
            await asyncio.sleep(max(REPORT_SECONDS, (time.thread_time() - began) / REPORT_SHARE))

    def _report(self, confirms: int = 0, *, save: bool = False) -> None:
        """Send what was counted, and the state of the running groups."""
        flight, now = self._parts.client.inflight, time.monotonic()
        engines = vars(flight.take_figures())
        continued = engines.pop("continued")
        counts = wire.Counts(
            dict(flight.tokens),
            flight.late_tokens,
            flight.take_needed(),
            engines,
            dict(continued),
            self._parts.take_sums(),
            self._parts.proxies(),
        )
        groups = self._playing.items()
        running = {name: [_running(one, now) for one in sessions] for name, (_, sessions, _) in groups}
        said = {
            name: [msgspec.Raw(encode(one.said())) for one in sessions]
            for name, (play, sessions, _) in groups
            if save and play.ticket
        }
        self._channel.send(wire.Report(confirms, counts, running, flight.served.in_use(flight.version), said))


def _running(session: GenerationSession, now: float) -> wire.RunningEpisode:
    activity = session.activity
    name = activity.open[-1].name if activity.open else ""
    return wire.RunningEpisode(session.received, activity.phase, name, now - activity.since)


async def main(run_dir: Path, number: int) -> int:
    """Play until the rollout process ends, or the launcher sends SIGTERM. Return the exit code."""
    contain(asyncio.get_running_loop())
    config, addresses = read(run_dir), Addresses.read(run_dir)
    progress = Progress(run_dir, f"episodes-{number}", config.cluster.stall_timeout)
    progress.doing("starting", within=config.rollout.batch_timeout)
    progress.watch()
    channel = await _connected(addresses)
    channel.send(wire.Hello(addresses.api_key, number))
    model, tasks = ModelParts.load(config, addresses.model, addresses.gpus), build_all(config)
    count = (config.model_extra or {})["processes"].count
    requests = f"{number:04d}{secrets.token_hex(4)}-"  # another one after each start: engines may still have old ones
    parts = PlayingParts.build(config, addresses, model, tasks, channel.warn, requests, count)
    import_hooks.done()
    following = asyncio.create_task(progress.follow())

    def question(task: str, index: int) -> Question:
        return question_of(tasks[task], model.template, index, config.field_of(task))

    rendered = partial(render, model.template)
    worker = EpisodeWorker(channel, parts, question, rendered, record=config.record)
    running = asyncio.create_task(play_until_closed(channel, worker))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await asyncio.wait({running})
        if not running.cancelled():
            await asyncio.sleep(LAST_SECONDS)
        await running
    except asyncio.CancelledError:
        return 0
    finally:
        following.cancel()
        progress.doing("ending", within=config.cluster.stop_grace)
        await parts.close()
    return PEER_FAILED


async def play_until_closed(channel: wire.Channel, worker: EpisodeWorker) -> None:
    """Play until the rollout process closes the connection. An error of ours is sent there."""
    try:
        await worker.run()
    except BaseExceptionGroup as raised:
        cause = first_of(raised)
        if isinstance(cause, ConnectionError):
            return
        channel.send(wire.Broken(str(cause) if isinstance(cause, AsyncRLError) else described(cause)))
        await channel.flush()
        raise
    finally:
        channel.close()


async def _connected(addresses: Addresses) -> wire.Channel:
    """Connect to the rollout process, which starts at the same time; the launcher ends a run that does not begin."""
    while True:
        try:
            return await wire.connect(addresses.extensions["processes"]["url"], addresses.access)
        except OSError:
            await asyncio.sleep(CONNECT_SECONDS)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher ends them in order
    with failing(Path(sys.argv[1]), f"episodes-{sys.argv[2]}"):
        code = asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
    sys.exit(code)
