"""Events of a stream, however the network cuts it, and the end of one that falls silent."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.engine.stream import GenerateEndpoint, StreamBroken, _events
from asyncrl.network.addresses import Access
from tests.fakes import until

EVENTS = [b"data: {}", b"", b"data: [1,2]", b"x", b"data: [DONE]"]
STREAM = b"".join(event + b"\n\n" for event in EVENTS)


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=len(STREAM)))
def test_events_do_not_depend_on_the_chunks_in_which_they_arrive(cuts: list[int]) -> None:
    places, waiting = [0, *sorted(cuts), len(STREAM)], bytearray()
    chunks = [STREAM[start:end] for start, end in pairwise(places)]
    assert [event for chunk in chunks for event in _events(waiting, chunk)] == EVENTS
    assert not waiting


def test_bytes_one_by_one_are_the_same_events() -> None:
    waiting = bytearray()
    assert [event for byte in STREAM for event in _events(waiting, bytes([byte]))] == EVENTS


@given(st.lists(st.binary(max_size=5).map(lambda x: x.replace(b"\n", b"\r")), max_size=6), st.randoms())
def test_events_are_whole_wherever_the_stream_was_split(events: list[bytes], draw: Any) -> None:
    data, waiting, found = b"".join(event + b"\n\n" for event in events) + b"rest", bytearray(), []
    while data:
        size = draw.randint(1, 7)
        found += list(_events(waiting, data[:size]))
        data = data[size:]
    assert (found, bytes(waiting)) == (events, b"rest")


@pytest.mark.parametrize("chunks", [4, 5], ids=["the timer was set before the last chunk", "and with it"])
def test_stream_breaks_when_no_chunk_came_in_time(chunks: int) -> None:
    """The chunks come in two thirds of the timeout each; in between, the timer fires at every second one. The clock of
    the loop goes on when this test says so."""
    timeout, pause = 0.75, 0.5  # sums of these are exact at any time that the clock begins with
    event = b"data: " + json.dumps({"index": 0, "output_ids": [1], "meta_info": {"id": "a"}}).encode() + b"\n\n"
    writers: list[asyncio.StreamWriter] = []
    seen: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writers.append(writer)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    async def read(endpoint: GenerateEndpoint) -> None:
        async for piece in endpoint.stream({}, "key", {}, lambda engine: None):
            seen.append(piece)  # noqa: PERF401  the test looks at it meanwhile

    async def main() -> str:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        loop = asyncio.get_running_loop()
        now = float(round(loop.time()))
        loop.time = lambda: now  # type: ignore[method-assign]
        endpoint = GenerateEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Access(""), timeout)
        reading = asyncio.ensure_future(read(endpoint))
        await until(lambda: writers)
        for number in range(chunks):
            writers[0].write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            await until(lambda number=number: len(seen) > number)
            now += pause
            for _ in range(20):
                await asyncio.sleep(0)
            assert not reading.done()
        now += timeout - pause
        await until(reading.done)
        await endpoint.close()
        await until(closed.is_set)
        server.close()
        await server.wait_closed()
        with pytest.raises(StreamBroken) as broken:
            await reading
        return str(broken.value)

    closed = asyncio.Event()
    assert "Timeout" in asyncio.run(main())


@pytest.mark.parametrize("size", [0, 1])
def test_stream_beginning_with_part_of_an_event_waits(size: int) -> None:
    waiting = bytearray()
    assert list(_events(waiting, STREAM[:size])) == []
    assert list(_events(waiting, STREAM[size:])) == EVENTS
