"""Replay of a recorded schedule (replay.schedule): python -m asyncrl.extensions.replay.schedule_replay RUN_DIR.

This process replaces the rollout process and repeats the whole schedule of a recorded run, with the recorded answers
instead of engines. Buffer, server, staleness bound and ledger are the real ones: each recorded event is repeated when
its turn comes, and its result must be the recorded one.

    admitted     the buffer must issue the same ticket
    committed    the group is handed in, with the tokens that engines had generated
    rejected     likewise, for the same reason
    part_taken   the trainer's request is answered now, and not before; the part must hold the same groups
    taken        likewise, for the last part, or the whole batch, which with weights.overlap may come before `published`
                 of its version
    published    the trainer's publish is processed now; the ledger must be the same

    waits for    the trainer, which ends the run when it has trained the last batch
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config import read
from asyncrl.engine.inflight import EngineStats
from asyncrl.engine.served import ServedWeights
from asyncrl.errors import RecordError
from asyncrl.extensions.recording.events import Committed, Rejected
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.replay.extension import settings_of
from asyncrl.network.addresses import READY, Addresses
from asyncrl.network.tls import signed
from asyncrl.observability.intervals import Activity
from asyncrl.progress import failing
from asyncrl.rollout.buffer import CohortBuffer, Ticket
from asyncrl.rollout.build import build_buffer
from asyncrl.rollout.events import Adjusted, Admitted, Began, PartTaken, Published, Taken
from asyncrl.rollout.reporters import RunReporter
from asyncrl.rollout.server import RolloutServer
from asyncrl.rollout.serving import serve
from asyncrl.rollout.snapshot import ResumableGroups
from asyncrl.schema import Batch, Prompt

BALANCED = ("prompts", "groups", "trajectories", "tokens")
"""Parts of the ledger that must be the same; the events outside the balance were those of engines."""


@dataclass(eq=False)
class _Session:
    """Session of an episode whose answers are known."""

    received: int = 0
    waits_for: str = ""
    since: float = 0.0
    activity: Activity = field(default_factory=Activity)

    def close(self) -> int:
        return self.received


@dataclass
class _InFlight:
    """Stand-in for the client's requests in flight: there are none."""

    tokens: Counter[str] = field(default_factory=Counter)
    late_tokens: int = 0
    figures: EngineStats = field(default_factory=EngineStats)
    served: ServedWeights = field(default_factory=ServedWeights)
    held: float = 0.0

    def take_figures(self) -> EngineStats:
        return EngineStats()

    def hold(self) -> None: ...

    def release(self, version: int) -> None: ...

    async def confirmed(self, seconds: float | None = None) -> bool:
        return True


@dataclass
class _Client:
    inflight: _InFlight


class ScheduleReplay(ResumableGroups):
    """The groups, with the recorded events in place of the worker."""

    def __init__(self, recording: Recording, buffer: CohortBuffer, **settings: Any) -> None:
        self._recording, self.inflight = recording, _InFlight()
        client: Any = _Client(self.inflight)
        super().__init__(buffer, client, **settings)
        self._tickets: dict[int, Ticket] = {}
        self._sessions: dict[Ticket, list[_Session]] = {}
        self._allowed = 0  # number of parts of the next batch that the trainer may have by now
        self._publishing, self._over = -1, False

    # -- requests of the trainer ---------------------------------------------------------------------------

    def may_take(self) -> bool:
        return self._handed_out(self._buffer.step) < self._allowed

    def _take(self, version: int, part: int, parts: int) -> Batch | None:
        batch = super()._take(version, part, parts)
        if batch is None and version == self._buffer.step and self._handed_out(version) == part < self._allowed:
            raise RecordError(
                f"batch {version} was taken here in the recorded run, but the buffer has none: {self.waiting_for()}"
            )
        return batch

    def _handed_out(self, step: int) -> int:
        """Return the number of parts of a batch in training that the trainer has."""
        return len(self._parts.get(step, []))

    async def may_publish(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._publishing == version or self._over)

    # -- recorded events -----------------------------------------------------------------------------------

    async def play(self) -> None:
        """Repeat all events. Raises RecordError at the first whose result differs."""
        for event in self._recording.events():
            match event:
                case Admitted():
                    self._admit(event)
                case Committed():
                    group = self._recording.whole(event.group)
                    ticket = self._close_with(event.slot, group.num_tokens + event.discarded)
                    await self.commit(ticket, group)
                case Rejected():
                    ticket = self._close_with(event.slot, event.tokens)
                    await self.reject(ticket, event.reason, self._recording.whole(event.group) if event.group else None)
                case PartTaken() | Taken():
                    await self._take_again(event)
                case Adjusted():
                    await self.adjust(event.lead, None)
                case Published():
                    await self._publish_again(event)
                case Began() if event.version > self._buffer.version:
                    problem = f"begins at version {event.version}: the steps before are in another run's recording"
                    raise RecordError(f"{self._recording.folder} {problem}")
        self._over = True  # the run was ended before it published its last batch
        await self._wake()

    def _admit(self, event: Admitted) -> None:
        ticket = self._buffer.admit()
        if ticket != Ticket(event.slot, event.born, event.cohort):
            raise RecordError(f"the buffer admits {ticket}, but the recording has {event}")
        self._tickets[event.slot] = ticket
        self._sessions[ticket] = [_Session() for _ in range(event.trajectories)]
        prompt = self.draw(lambda: Prompt(event.prompt, [], {}, ""))
        self.begin(ticket, prompt, self._sessions[ticket])  # type: ignore[arg-type]

    def _close_with(self, slot: int, tokens: int) -> Ticket:
        """End the group of this slot, for which engines generated so many tokens, and return its ticket."""
        ticket = self._tickets.pop(slot)
        self._received(self._sessions.pop(ticket), tokens)
        return ticket

    def _received(self, sessions: list[_Session], tokens: int) -> None:
        """Set the number of tokens that these sessions received in total."""
        for session in sessions:
            self.inflight.tokens["training"] -= session.received
            session.received = 0
        if sessions:
            sessions[0].received = tokens
            self.inflight.tokens["training"] += tokens

    async def _take_again(self, event: PartTaken | Taken) -> None:
        if event.step > self._buffer.version + self._buffer.ahead:
            raise RecordError(
                f"batch {event.step} was taken before version {event.step} was published: set weights.overlap=true, as "
                "in the recorded run"
            )
        part = self._handed_out(event.step)
        self._allowed = part + 1
        await self._wake()
        async with self._changed:
            await self._changed.wait_for(lambda: self._handed_out(event.step) > part)
        self._allowed = 0
        whole = isinstance(event, Taken)
        uids = [group.uid for group in (self._buffer.training if whole else self._parts[event.step][part].groups)]
        if uids != event.uids:
            raise RecordError(f"batch {event.step} has the groups {uids}, but the recording has {event.uids}")

    async def _publish_again(self, event: Published) -> None:
        tokens = event.ledger["tokens"]
        self._received([session for sessions in self._sessions.values() for session in sessions], tokens["running"])
        for purpose in ("evaluation", "past"):
            self.inflight.tokens[purpose] = event.ledger["events"].get(f"{purpose}_tokens", 0)
        self._publishing = event.version
        late = tokens["discarded"] - self.ledger().tokens.discarded  # of sessions that had ended
        self.inflight.late_tokens += late
        self.inflight.tokens["training"] += late
        await self._wake()
        async with self._changed:
            await self._changed.wait_for(lambda: self._buffer.version == event.version)
        found = asdict(self.ledger())
        for part in BALANCED:
            if found[part] != event.ledger[part]:
                raise RecordError(
                    f"at version {event.version} the ledger's {part} are {found[part]}, but the recording "
                    f"has {event.ledger[part]}"
                )


async def main(run_dir: Path) -> None:
    """Serve until the launcher sends SIGTERM or the replay diverges."""
    config, addresses = read(run_dir), Addresses.read(run_dir)
    recording = Recording(settings_of(config).folder)
    buffer = build_buffer(config.rollout, overlap=config.weights.overlap)
    groups = ScheduleReplay(recording, buffer, publish=RunReporter(run_dir).publish)
    inflight: Any = groups.inflight
    server = RolloutServer(groups, inflight, None, addresses.api_key)
    (run_dir / READY).touch()
    await serve(server, addresses.rollout, groups.play(), signed(run_dir, addresses.rollout))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the launcher ends them in order
    with failing(Path(sys.argv[1]), "rollout"):
        asyncio.run(main(Path(sys.argv[1])))
