"""What the rollout process and the processes that play episodes tell each other (processes.count), and the
connection that carries it: length-prefixed msgpack over TCP, with the certificates and the API key of the run.

    rollout -> episodes    Begin, Play, Stop, Render, Hold, Drain, Release, Narrow, Save
    episodes -> rollout    Hello, Finished, Answered, Failed, Rendered, Report, Warned, Broken

Messages arrive in the order in which they were sent. Commands have a number, and the Report that names it confirms that
the command is done.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from asyncrl.engine.served import InUse
from asyncrl.extensions.recording.events import CompressedGroup
from asyncrl.network.addresses import Access
from asyncrl.network.tls import Signed
from asyncrl.observability.intervals import Interval
from asyncrl.rollout.buffer import Ticket
from asyncrl.rollout.player import Sums
from asyncrl.schema import Exchange, Trajectory, encode

HELLO_BYTES, HELLO_SECONDS = 4096, 30.0
"""Largest size of the first message of a connection, which has no key yet, and how long it may take."""
SIZE_BYTES = 8
BUFFER_BYTES = 1 << 22
"""Bytes that a connection reads ahead: a group with long answers is a message of megabytes."""


class WireMessage(msgspec.Struct, array_like=True, tag=True):
    """Base class of all messages."""


# -- from the rollout process ---------------------------------------------------------------------------------


class Begin(WireMessage):
    """First message: the state that the engines are in, and the longest sequence that fits their caches."""

    number: int
    version: int
    holding: bool
    context: int | None


class SampleToPlay(msgspec.Struct, frozen=True, array_like=True):
    """One episode to play. A resumed one has received tokens already, and has completions to recall."""

    name: str
    temperature: float
    received: int = 0
    said: list[Exchange] = []


class Play(WireMessage):
    """Play a group, or all attempts at a question of an evaluation, which has no ticket."""

    group: str
    ticket: Ticket | None
    born: int
    pinned: int | None
    prompt: str  # uid
    task: str
    index: int
    token_ids: list[int]
    images: list[bytes]
    samples: list[SampleToPlay]


class Stop(WireMessage):
    """Stop a group, which then fails."""

    group: str


class Render(WireMessage):
    """Render these questions, by task and index, which are drawn soon."""

    questions: list[tuple[str, int]]


class Hold(WireMessage):
    """Hold new requests back."""

    number: int


class Drain(WireMessage):
    """Confirm as soon as no request is in flight."""

    number: int


class Release(WireMessage):
    """Every engine serves this version: send requests again."""

    number: int
    version: int


class Save(WireMessage):
    """Confirm with all completions of the running groups."""

    number: int


class Narrow(WireMessage):
    """An engine's cache has room for sequences of this length."""

    context: int


Command = Begin | Play | Stop | Render | Hold | Drain | Release | Save | Narrow

# -- from the processes that play ------------------------------------------------------------------------------


class Hello(WireMessage):
    """First message: the run's API key, and the number of the process."""

    key: str
    number: int


class EndedEpisode(msgspec.Struct, frozen=True, array_like=True):
    """An episode that has ended: its tokens, when it began, and what it did."""

    received: int
    began: float
    intervals: list[Interval]


class Finished(WireMessage):
    """A group that was played to its end. `verdict` is that of rollout.accept."""

    group: str
    episodes: list[EndedEpisode]
    verdict: bool | str
    lengths: list[int]
    rewards: list[float]
    data: bytes  # the encoded Group, which a reader of the message need not walk through
    compressed: CompressedGroup | None  # for the recording


class Answered(WireMessage):
    """All attempts at a question: trajectories, or why there is none."""

    group: str
    episodes: list[EndedEpisode]
    attempts: list[Trajectory | str]


class Failed(WireMessage):
    """A group that failed or was stopped. The process that played it has reported the failure."""

    group: str
    episodes: list[EndedEpisode]
    reason: str
    detail: str


class RenderedQuestion(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a question."""

    task: str
    index: int
    token_ids: msgspec.Raw


class Rendered(WireMessage):
    """Rendered questions. One that cannot be rendered is left out."""

    questions: list[RenderedQuestion]


class RunningEpisode(msgspec.Struct, frozen=True, array_like=True):
    """A running episode: its tokens, what it does and for what, and for how many seconds it has been silent."""

    received: int
    phase: str
    name: str
    silent: float


class Counts(msgspec.Struct, array_like=True):
    """What a process has counted: `tokens`, `late` and `proxies` since its start, the rest since its last report."""

    tokens: dict[str, int]
    late: int
    needed: int
    engines: dict[str, float]  # fields of EngineStats
    continued: dict[str, int]
    sums: Sums
    proxies: dict[str, float]


class Report(WireMessage):
    """Everything that a process has counted, and all of its running groups at the same instant."""

    confirms: int  # number of a command, or 0
    counts: Counts
    running: dict[str, list[RunningEpisode]]
    in_use: InUse
    said: dict[str, list[msgspec.Raw]] = {}  # completions of each episode, if they were asked for


class Warned(WireMessage):
    """A warning."""

    text: str
    traceback: str | None


class Broken(WireMessage):
    """An error that ends the run."""

    error: str


Answer = Finished | Answered | Failed | Rendered | Report | Warned | Broken


class Channel:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any) -> None:
        """`kind` is the type of the messages that arrive."""
        self._reader, self._writer = reader, writer
        self._loop = asyncio.get_running_loop()
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind).decode

    def send(self, message: WireMessage) -> None:
        """Send a message, after all earlier ones."""
        data = encode(message)
        self._writer.writelines((len(data).to_bytes(SIZE_BYTES), data))

    def warn(self, text: str, traceback: str | None = None) -> None:
        """Send a warning. It may come from any thread."""
        self._loop.call_soon_threadsafe(self.send, Warned(text, traceback))

    async def drain(self) -> None:
        """Wait until the other end has taken most of what was sent."""
        await self._writer.drain()

    async def flush(self) -> None:
        """Wait until everything is sent, or the connection is lost."""
        self._writer.transport.set_write_buffer_limits(0)
        with suppress(OSError):
            await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next message. Raises ConnectionError at the end of the connection."""
        try:
            size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES))
            return self._decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ConnectionError(str(error) or "the connection was closed") from None

    async def hello(self) -> Hello:
        """Return the first message. Raises ConnectionError, or TimeoutError if it does not come."""
        async with asyncio.timeout(HELLO_SECONDS):
            try:
                size = int.from_bytes(await self._reader.readexactly(SIZE_BYTES))
                if size > HELLO_BYTES:
                    raise ConnectionError("the first message is too long")
                return msgspec.msgpack.decode(await self._reader.readexactly(size), type=Hello)
            except (asyncio.IncompleteReadError, msgspec.DecodeError, OSError) as error:
                raise ConnectionError(str(error)) from None

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()


async def connect(url: str, access: Access) -> Channel:
    """Connect to the rollout process. Raises OSError while it does not listen, or if it is not the run's."""
    address = urlsplit(url)
    context = access.context if address.scheme == "https" else None
    reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=context, limit=BUFFER_BYTES)
    return Channel(reader, writer, Command)


async def listen(
    url: str, signed: Signed | None, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]
) -> asyncio.Server:
    """Listen at this URL, with the run's certificate if it has one."""
    address, context = urlsplit(url), None
    if signed:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(signed.server)
    return await asyncio.start_server(serve, address.hostname, address.port, ssl=context, limit=BUFFER_BYTES)
