"""The processes that play episodes, as the rollout process sees them (processes.count=N, episodes.py).

To everything else in the rollout process this is the client and its requests in flight, and what plays groups: the same
interfaces with N processes behind them. Groups go to the process with the fewest running episodes. The launcher starts
a process that dies again; its groups are played anew in another one, with their tickets, and so for the same seats of
the same cohorts: what is generated anew is of no older version than the ticket, and the batch waits for it as before.

Accounting: a process reports what it has counted and received for every running group, at one instant. Between two
reports, the tokens of a group that ends are added to both sides of the ledger, so that it balances at any time; the
next report brings the independent count. The count of a process that died stays as it was told, and so do the tokens of
its episodes, which end as discarded.

waits for     a process that can play (`play`); confirmations of a publish and of a snapshot (`confirmed`)
unblocked by  their messages, and their death; the launcher finds those that hang
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from asyncrl.engine.inflight import EngineStats
from asyncrl.engine.served import InUse, ServedWeights
from asyncrl.engine.session import Purpose
from asyncrl.errors import AsyncRLError, EpisodeFailed
from asyncrl.extensions.processes import wire
from asyncrl.extensions.processes.encoded import EncodedGroup
from asyncrl.extensions.processes.remote import RemoteSession, WorkerConnection
from asyncrl.extensions.processes.rendering import RenderedAhead
from asyncrl.network.tls import signed
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.evaluation import Attempt
from asyncrl.rollout.parts import served_by
from asyncrl.rollout.player import LOST, Sums, means
from asyncrl.rollout.reporters import RolloutRun
from asyncrl.schema import Group, Prompt, Trajectory

LOSSES = 3
"""A group that has lost its process so often is rejected for the reason "process", and the attempts at a question of an
evaluation fail: they may be what kills them."""
TOLD_SECONDS = 5.0
"""Seconds until a warning tells of a lost process. All are lost when a run ends, which takes less (CLOSE_SECONDS in
rollout/serving.py)."""


class EpisodeWorkers:
    """All processes of a run that play episodes."""

    def __init__(self, run: RolloutRun, count: int) -> None:
        config = run.config
        self._run, self._warn, self._count = run, run.warn, count
        self._temperature = config.rollout.temperature
        self._connections: dict[int, WorkerConnection] = {}
        self._changed = asyncio.Condition()
        self._context: int | None = None
        self._begun, self._serial = False, 0
        self._failed, self._error = asyncio.Event(), BaseException()
        self._past_tokens, self._past_late, self._past_proxies = Counter[str](), 0, Counter[str]()
        self._sums: Sums = {}
        self._needed = self._lost = self._replayed = 0
        self._stopped, self.most_losses = set[str](), LOSSES
        self.client = self.inflight = self.groups = self
        self.version, self.held, self.holding = 0, 0.0, False
        self.figures = EngineStats()
        self.ahead = RenderedAhead(self._render, config.rollout.batch_groups)
        self.served = _ServedByAll(served_by(config, run.addresses), self._connections)

    async def serve(self) -> None:
        """Take the processes that connect, until cancelled. Raises the error of a process that ends the run."""
        run_dir, url = self._run.run_dir, self._run.addresses.extensions["processes"]["url"]
        server = await wire.listen(url, signed(run_dir, url), self._connected)
        try:
            await self._failed.wait()
            raise self._error
        finally:
            server.close()
            await self.close()

    # -- as the client -------------------------------------------------------------------------------------

    def generate(
        self,
        temperature: float | None = None,
        *,
        group: str = "",
        purpose: Purpose = "training",
        sample: str = "",
        pinned: int | None = None,
        born: int | None = None,
    ) -> Any:
        """Return a session for one episode (engine/client.py)."""
        temperature = self._temperature if temperature is None else temperature
        born = self.version if born is None else born
        return RemoteSession(group, wire.SampleToPlay(sample, temperature), born, purpose=purpose, pinned=pinned)

    def narrow(self, context: int) -> None:
        """Lower the maximum length of a sequence (engine/client.py)."""
        self._context = min(self._context or context, context)
        for connection in self._connections.values():
            connection.channel.send(wire.Narrow(self._context))

    async def start(self) -> None:
        """Wait until all processes can play."""
        self._begun = True
        for connection in list(self._connections.values()):
            self._begin(connection)
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._ready()) == self._count)

    async def close(self) -> None:
        """Close the connections, upon which the processes end."""
        for connection in self._connections.values():
            connection.channel.close()

    # -- as what plays -------------------------------------------------------------------------------------

    async def play(self, ticket: Ticket, prompt: Prompt, sessions: Sequence[Any]) -> tuple[Group, bool | str]:
        """Play a group in the process with the fewest episodes (rollout/player.py), and if that is lost, in
        another one."""
        try:
            answer = await self._outlived(ticket.uid, ticket, prompt, sessions)
        finally:
            self._stopped.discard(ticket.uid)
        if isinstance(answer, wire.Failed):
            raise EpisodeFailed(answer.reason, answer.detail)
        group: Any = EncodedGroup(
            ticket.uid,
            ticket.slot,
            prompt.task,
            answer.lengths,
            answer.rewards,
            answer.data,
            answer.compressed,
        )
        return group, answer.verdict

    async def _outlived(self, group: str, ticket: Ticket | None, prompt: Prompt, sessions: Sequence[Any]) -> Any:
        """Return the answer of the first process that outlives the group. Raises EpisodeFailed after LOSSES, and for a
        group that was stopped. That of an evaluation has no ticket."""
        losses = 0
        while True:
            try:
                return await self._answer(group, ticket, prompt, sessions)
            except EpisodeFailed as lost:
                losses += 1
                if losses == self.most_losses:
                    self._warn(f"group {group} is given up: {losses} processes were lost while they played it")
                if losses == self.most_losses or group in self._stopped:
                    raise EpisodeFailed(LOST, lost.detail) from None
                if ticket:
                    self._replayed += 1

    def stop(self, ticket: Ticket, playing: asyncio.Task[None]) -> None:
        """Tell the process to stop a group, or cancel the task if none plays it."""
        for connection in self._connections.values():
            if ticket.uid in connection.groups:
                self._stopped.add(ticket.uid)
                connection.channel.send(wire.Stop(ticket.uid))
                return
        playing.cancel()

    async def attempts(self, prompt: Prompt, sessions: Sequence[Any]) -> list[Attempt]:
        """Play all attempts at a question of an evaluation (rollout/evaluation.py). They are played again if their
        process dies, and fail after LOSSES."""
        try:
            answer = await self._outlived(sessions[0].group, None, prompt, sessions)
        except EpisodeFailed as lost:
            return [lost] * len(sessions)
        return [one if isinstance(one, Trajectory) else AsyncRLError(one) for one in answer.attempts]

    async def _answer(
        self, group: str, ticket: Ticket | None, prompt: Prompt, sessions: Sequence[RemoteSession]
    ) -> Any:
        async with self._changed:
            await self._changed.wait_for(self._ready)
            connection = min(self._ready(), key=lambda one: (one.episodes, one.number))
        first, samples = sessions[0], [session.to_play() for session in sessions]
        named = group, ticket, first.born, first.pinned, prompt.uid, prompt.task, prompt.index
        return await connection.begin(wire.Play(*named, prompt.token_ids, prompt.images, samples), sessions)

    def _render(self, questions: list[tuple[str, int]]) -> None:
        """Let the process with the fewest episodes render questions, if one can."""
        if ready := self._ready():
            min(ready, key=lambda one: one.episodes).channel.send(wire.Render(questions))

    # -- as the requests in flight -------------------------------------------------------------------------

    @property
    def tokens(self) -> Counter[str]:
        """Tokens received so far, by purpose."""
        return sum((one.tokens for one in self._connections.values()), self._past_tokens)

    @property
    def late_tokens(self) -> int:
        """Tokens that arrived for groups that had ended; `tokens` counts them, too."""
        return self._past_late + sum(one.late for one in self._connections.values())

    def hold(self) -> None:
        """Hold new requests back, in all processes."""
        if not self.holding:
            self.holding, self.held = True, time.time()
            self._tell_all(wire.Hold)

    def release(self, version: int) -> None:
        """Send requests again, in all processes: every engine serves this version."""
        self.version, self.holding, self.held = version, False, 0.0
        self._tell_all(lambda number: wire.Release(number, version))

    def restore(self, version: int, tokens: Mapping[str, int], late: int) -> None:
        """Restore the saved version and token counts (engine/inflight.py)."""
        self.version, self._past_tokens, self._past_late = version, Counter(tokens), late
        self.hold()

    async def confirmed(self, seconds: float | None = None) -> bool:
        """Wait until all processes have done what they were told. Return False when that takes longer than `seconds`.

        One that is starting again has no request in flight, and does what it is told before it sends any: nobody waits
        for it."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: not any(one.pending for one in self._ready()))
        except TimeoutError:
            return False
        return True

    async def drained(self, seconds: float) -> bool:
        """Wait until no request is in flight in any process. Return False when that takes longer than `seconds`."""
        if not any(wire.Drain in one.pending.values() for one in self._connections.values()):
            self._tell_all(wire.Drain)
        return await self.confirmed(seconds)

    async def gathered(self) -> None:
        """Bring all sessions up to date, with their completions, for a snapshot."""
        self._tell_all(wire.Save)
        await self.confirmed()

    def take_needed(self) -> int:
        """Return the tokens since the last call that even a perfect cache would leave to prefill."""
        needed, self._needed = self._needed, 0
        return needed

    def take_figures(self) -> EngineStats:
        """Return the statistics since the last call. Time with requests in flight is that of the busiest process."""
        taken, self.figures = self.figures, EngineStats()
        taken.seconds_busy = max((one.busy for one in self._connections.values()), default=0.0)
        for connection in self._connections.values():
            connection.busy = 0.0
        return taken

    def take_played(self) -> dict[str, float]:
        """Return the figures of agents, rewards and teacher since the last call, under their names in
        metrics.jsonl."""
        sums, self._sums = self._sums, {}
        proxies = sum((one.proxies for one in self._connections.values()), self._past_proxies)
        ready = self._ready()
        processes = {
            "processes/playing": float(len(ready)),
            "processes/episodes/most": float(max((one.episodes for one in ready), default=0)),
            "processes/lost": float(self._lost),
            "processes/replayed": float(self._replayed),
        }
        return {**means(sums), **proxies, **processes}

    # -- connections ---------------------------------------------------------------------------------------

    def _ready(self) -> list[WorkerConnection]:
        return [one for one in self._connections.values() if one.ready]

    def _begin(self, connection: WorkerConnection) -> None:
        self._command(connection, lambda number: wire.Begin(number, self.version, self.holding, self._context))

    def _tell_all(self, command: Callable[[int], wire.WireMessage]) -> None:
        for connection in self._connections.values():
            if self._begun:
                self._command(connection, command)

    def _command(self, connection: WorkerConnection, command: Callable[[int], wire.WireMessage]) -> None:
        self._serial += 1
        message = command(self._serial)
        connection.pending[self._serial] = type(message)
        connection.channel.send(message)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = wire.Channel(reader, writer, wire.Answer)
        try:
            hello = await channel.hello()
        except (ConnectionError, TimeoutError):
            return channel.close()
        if not hmac.compare_digest(hello.key.encode(), self._run.addresses.api_key.encode()):
            return channel.close()
        if hello.number in self._connections:
            await self._lose(self._connections[hello.number])
        task = asyncio.current_task()
        assert task
        task.add_done_callback(self._ended)
        connection = self._connections[hello.number] = WorkerConnection(hello.number, channel)
        if self._begun:
            self._begin(connection)
        try:
            while self._connections.get(hello.number) is connection:  # not what was on the way when it was given up
                self._take(connection, await channel.receive())
                async with self._changed:
                    self._changed.notify_all()
        except ConnectionError:
            await self._lose(connection)
        except asyncio.CancelledError:
            channel.close()  # the loop ends; asyncio would report a cancelled handler as an error
        except AsyncRLError:
            channel.close()
            raise

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End this process for an error of ours, or one that a process has sent."""
        if not task.cancelled() and (error := task.exception()):
            self._error = error
            self._failed.set()

    def _take(self, connection: WorkerConnection, message: Any) -> None:
        """Process a message."""
        match message:
            case wire.Report():
                connection.report(message)
                self._count_in(connection, message.counts)
                if connection.pending.pop(message.confirms, None) is wire.Begin:
                    connection.ready = True
            case wire.Rendered():
                self.ahead.came(message.questions)
            case wire.Warned():
                self._warn(message.text, message.traceback)
            case wire.Broken():
                raise AsyncRLError(message.error)
            case _:
                connection.ended(message)

    def _count_in(self, connection: WorkerConnection, counts: wire.Counts) -> None:
        """Add what a process has counted since its last report."""
        for figure, (summed, terms) in counts.sums.items():
            before, counted = self._sums.get(figure, (0.0, 0.0))
            self._sums[figure] = before + summed, counted + terms
        self._needed += counts.needed
        self.figures.continued.update(counts.continued)
        connection.busy += counts.engines.pop("seconds_busy")
        for name, value in counts.engines.items():
            setattr(self.figures, name, getattr(self.figures, name) + value)

    async def _lose(self, connection: WorkerConnection) -> None:
        """Give a process up that has died. What it has counted stays, and its groups are played anew."""
        if self._connections.get(connection.number) is not connection:
            return
        del self._connections[connection.number]
        self._past_tokens += connection.tokens
        self._past_late += connection.late
        self._past_proxies += connection.proxies
        self._lost += 1
        if connection.groups:
            text = f"episodes-{connection.number} was lost; its {len(connection.groups)} groups are played anew"
            asyncio.get_running_loop().call_later(TOLD_SECONDS, self._warn, text)
        connection.lost(EpisodeFailed(LOST, f"the process episodes-{connection.number} was lost"))
        async with self._changed:
            self._changed.notify_all()


class _ServedByAll(ServedWeights):
    """What is in use here, by evaluations, and in the processes."""

    def __init__(self, here: ServedWeights, connections: dict[int, WorkerConnection]) -> None:
        self._here = here
        self._connections = connections

    def held(self, version: int) -> AbstractContextManager[int | None]:
        """Hold a version for an evaluation."""
        return self._here.held(version)

    def in_use(self, newest: int) -> InUse:
        """Return what engines must keep while `newest` is the newest version."""
        every = [self._here.in_use(newest), *(one.in_use for one in self._connections.values())]
        past: dict[str, set[int]] = {}
        for one in every:
            for model, versions in one.past.items():
                past.setdefault(model, set()).update(versions)
        versions = sorted({version for one in every for version in one.versions})
        return InUse(versions, {model: sorted(found) for model, found in past.items()})
