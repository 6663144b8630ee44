"""Stub engines with SGLang's HTTP interface that generate fixed tokens at a given pace, to measure cost and scheduling.

A decode step takes as many real seconds as asyncrl/extensions/plan/engine.py computes. Lengths follow from the number
of a group, which the prompt contains as digits of the tiny model. One process serves several engines. Benchmarks and
fault campaigns use it in addition to the real engine, never instead of it. See `python scripts/stub_engine.py --help`.

The answer of sample i is [i, 0, 0, ...] with i below 10. A later turn follows SEPARATOR, so that a request itself shows
which sample and turn it continues, and from which token. With --lengths, samples of one prompt are counted over all
engines, because siblings may come as requests of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import socket
import struct
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl import jsonl
from asyncrl.extensions.plan.engine import EngineShape, SimulatedEngine, SimulatedRequest
from asyncrl.extensions.plan.lengths import Lengths

QUESTION_ENDS, SEPARATOR = 11, 12
"""Tokens "=" and "<bos>" of the tiny model's vocabulary."""
encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class Sample:
    """One sample of a request."""

    index: int
    header: list[int]
    job: SimulatedRequest
    total: int
    told: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)  # (version, start)


@dataclass(eq=False)
class Stream:
    """Request and its reader."""

    rid: str
    prompt: int
    samples: list[Sample]
    cut_after: float = math.inf  # tokens
    events: asyncio.Queue[tuple[bytes, int] | None] = field(
        default_factory=asyncio.Queue
    )  # events with their numbers of tokens


MEMORY = {"weights", "kv_cache"}


class Stub:
    """Stub of one engine."""

    def __init__(
        self,
        shape: EngineShape,
        tokens: Callable[[Sequence[int], int, int], int],
        interval: int,
        version: str = "0",
        growth: Callable[[str], float] = lambda version: 1.0,
        siblings: Callable[[Sequence[int]], int] | None = None,
        loaded: Path | None = None,
    ) -> None:
        """`siblings` returns the number of a prompt's next sample; unset: that in its request. `loaded` gets a line for
        the weights of each version that it loads."""
        self._siblings, self._loaded = siblings, loaded
        self._session = False
        self._engine, self._tokens, self._interval = SimulatedEngine(shape), tokens, interval
        self._version, self._growth = version, growth
        self._cuts: deque[int] = deque()
        self._streams: dict[SimulatedRequest, tuple[Stream, Sample]] = {}
        self._changed = asyncio.Event()
        self._memory = set(MEMORY)  # what has memory

    # -- the clock -----------------------------------------------------------------------------------------

    async def run(self, _: web.Application) -> Any:
        """Send tokens when they are due."""
        task = asyncio.ensure_future(self._write())
        task.add_done_callback(_end_with)
        yield
        task.cancel()

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            due = self._engine.next_time() - loop.time()
            if due > 0:
                try:
                    await asyncio.wait_for(self._changed.wait(), None if due == float("inf") else due)
                except TimeoutError:
                    pass
                else:
                    continue
            for job in self._engine.advance(loop.time()):
                self._tell(*self._streams[job], "length" if job.finished else None)

    def _tell(self, stream: Stream, sample: Sample, finish: str | None) -> None:
        upto = sample.total if finish == "length" else min(sample.total, int(sample.job.done))
        if upto == sample.total:
            finish = "length"  # it was complete before it was aborted
        ids = [*sample.header, *[0] * sample.total][sample.told : upto]
        meta: dict[str, Any] = {"id": stream.rid, "finish_reason": None}
        meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
        sample.told = upto
        if finish:
            ends = [start for _, start in sample.versions[1:]] + [upto]
            spans = [(version, start, end) for (version, start), end in zip(sample.versions, ends, strict=True)]
            meta |= {
                "finish_reason": {"type": finish},
                "weight_versions": [
                    {"version": version, "start": start, "end": end} for version, start, end in spans if end > start
                ],
                "prompt_tokens": stream.prompt,
                "completion_tokens": upto,
                "cached_tokens": 0,
            }
            del self._streams[sample.job]
            stream.samples.remove(sample)
        event = encode({"text": "", "output_ids": ids, "meta_info": meta, "index": sample.index})
        stream.events.put_nowait((b"data: " + event + b"\n\n", len(ids)))
        if not stream.samples:
            stream.events.put_nowait(None)

    # -- requests ------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Stream all samples of a request concurrently."""
        body = msgspec.json.decode(await request.read())
        stream, told = self._accept(body), 0
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            while (item := await stream.events.get()) is not None:
                event, tokens = item
                told += tokens
                if told > stream.cut_after:
                    await response.write(event[: len(event) // 2])
                    _reset(request.transport)
                    return response
                await response.write(event)
            await response.write(b"data: [DONE]\n\n")
        finally:
            for sample in stream.samples:  # the reader has disconnected
                self._streams.pop(sample.job, None)
                self._engine.abort(sample.job, asyncio.get_running_loop().time())
                self._changed.set()
        return response

    def _accept(self, body: dict[str, Any]) -> Stream:
        ids, sampling = body["input_ids"], body["sampling_params"]
        prompt, said = split(ids)
        begun = said[-1]
        stream = Stream(body.get("rid", ""), len(ids), [])
        if self._cuts:
            stream.cut_after = self._cuts.popleft()
        for index in range(sampling["n"]):
            if len(said) > 1 or begun:
                sibling = (said[0] or [index])[0]
            else:
                sibling = self._siblings(prompt) if self._siblings else index
            length = round(self._tokens(prompt, sibling, len(said) - 1) * self._growth(self._version))
            total = max(1, min(length - len(begun), sampling["max_new_tokens"]))
            job = SimulatedRequest(
                total,
                len(ids),
                ((body.get("extra_key"), *prompt), len(prompt)),
                session=(*prompt, sibling),
                interval=self._interval,
            )
            header = [] if begun or len(said) > 1 else [sibling]
            sample = Sample(index, header, job, total, versions=[(self._version, 0)])
            stream.samples.append(sample)
            self._streams[job] = (stream, sample)
        now = asyncio.get_running_loop().time()
        for sample in stream.samples:
            self._engine.submit(sample.job, now)
        self._changed.set()
        return stream

    # -- the control plane ---------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        """Pause generation: in place, or by retracting or aborting requests."""
        mode, now = (await request.json()).get("mode", "abort"), asyncio.get_running_loop().time()
        if mode == "retract":
            self._engine.retract(now)
        if mode == "abort":
            self._abort("", now)
        self._engine.pause(now)
        self._changed.set()
        return web.json_response({"success": True})

    async def abort(self, request: web.Request) -> web.Response:
        """Abort the requests whose ids begin with a prefix."""
        body = await request.json()
        self._abort("" if body.get("abort_all") else body["rid"], asyncio.get_running_loop().time())
        return web.json_response({"success": True})

    def _abort(self, rid: str, now: float) -> None:
        for job, (stream, sample) in list(self._streams.items()):
            if stream.rid.startswith(rid):
                self._engine.abort(job, now)
                self._tell(stream, sample, "abort")
        self._changed.set()

    async def flush(self, _: web.Request) -> web.Response:
        """No-op: cache keys contain the version, so no entry of an older version is found."""
        return web.json_response({"success": True})

    async def cut(self, request: web.Request) -> web.Response:
        """Inject a fault: reset the connections of the next requests within the chunk that exceeds so many tokens."""
        body = await request.json()
        self._cuts.extend([body["tokens"]] * body["requests"])
        return web.json_response({"success": True})

    async def release(self, request: web.Request) -> web.Response:
        """Release memory, which SGLang does only while no request runs."""
        tags = set((await request.json())["tags"])
        if self._streams or not tags <= self._memory:
            return web.json_response({"success": False, "memory": sorted(self._memory)}, status=400)
        self._memory -= tags
        return web.json_response({"success": True})

    async def resume(self, request: web.Request) -> web.Response:
        """Take memory back."""
        tags = set((await request.json())["tags"])
        if tags & self._memory:
            return web.json_response({"success": False, "memory": sorted(self._memory)}, status=400)
        self._memory |= tags
        return web.json_response({"success": True})

    async def proceed(self, _: web.Request) -> web.Response:
        """Continue generation."""
        if self._memory != MEMORY:
            return web.json_response({"success": False, "memory": sorted(self._memory)}, status=400)
        self._engine.resume(asyncio.get_running_loop().time())
        self._changed.set()
        return web.json_response({"success": True})

    async def version(self, request: web.Request) -> web.Response:
        """Set the version of the weights."""
        self._version = str((await request.json())["new_version"])
        now = asyncio.get_running_loop().time()
        for job, (_, sample) in self._streams.items():
            sample.versions.append((self._version, min(sample.total, int(self._engine.written(job, now)))))
        return web.json_response({"success": True, "new_version": self._version})

    async def begin(self, _: web.Request) -> web.Response:
        """Open a session of a weight update, unless one is open."""
        opened, self._session = not self._session, True
        return web.json_response({"success": opened}, status=200 if opened else 400)

    async def end(self, _: web.Request) -> web.Response:
        """Close the session, if one is open."""
        closed, self._session = self._session, False
        return web.json_response({"success": closed}, status=200 if closed else 400)

    async def load(self, request: web.Request) -> web.Response:
        """Read weights from the disk, as SGLang does, and write down their digest."""
        folder = Path((await request.json())["model_path"])
        if self._loaded:
            jsonl.append(self._loaded, {"folder": folder.name, "digest": digest_of(folder)})
        return web.json_response({"success": True})

    async def model(self, _: web.Request) -> web.Response:
        """Return the model and its version."""
        return web.json_response({"model_path": "stub", "weight_version": self._version})

    async def loads(self, _: web.Request) -> web.Response:
        """Return the load, as SGLang's /v1/loads does."""
        engine = self._engine
        capacity = min(engine.shape.kv_tokens, 1e12)
        load = {
            "dp_rank": 0,
            "num_running_reqs": engine.running,
            "num_waiting_reqs": engine.waiting,
            "num_used_tokens": round(engine.used),
            "max_total_num_tokens": round(capacity),
            "total_prefill_uncached_tokens": round(engine.prefilled),
            "total_prefill_busy_us": round(engine.prefill_seconds * 1e6),
            "token_usage": engine.used / capacity,
        }
        return web.json_response({"loads": [load]})

    async def metrics(self, _: web.Request) -> web.Response:
        """Return the counters, as SGLang's /metrics does with --enable-metrics."""
        engine = self._engine
        tokens = {"decode": engine.decoded, "prefill_compute": engine.prefilled, "prefill_cache": 0}
        lines = [f'sglang:realtime_tokens_total{{mode="{mode}"}} {count}' for mode, count in tokens.items()]
        lines.append(f'sglang:num_retracted_requests_total{{tp_rank="0"}} {engine.retractions}')
        return web.Response(text="\n".join(lines) + "\n")

    async def figures(self, _: web.Request) -> web.Response:
        """Return the figures of the simulated engine."""
        engine = self._engine
        return web.json_response(
            {
                "in_flight": len({id(stream) for stream, _ in self._streams.values()}),
                "decoded": engine.decoded,
                "prefilled": engine.prefilled,
                "retractions": engine.retractions,
            }
        )

    async def well(self, _: web.Request) -> web.Response:
        """Report that the engine is healthy."""
        return web.json_response({})

    def app(self) -> web.Application:
        """Return the application with its routes."""
        app = web.Application(client_max_size=1 << 28)
        app.cleanup_ctx.append(self.run)
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.proceed),
                web.post("/release_memory_occupation", self.release),
                web.post("/resume_memory_occupation", self.resume),
                web.post("/abort_request", self.abort),
                web.post("/flush_cache", self.flush),
                web.post("/begin_weight_update", self.begin),
                web.post("/end_weight_update", self.end),
                web.post("/update_weight_version", self.version),
                web.post("/update_weights_from_disk", self.load),
                web.post("/cut", self.cut),
                web.get("/model_info", self.model),
                web.get("/v1/loads", self.loads),
                web.get("/metrics", self.metrics),
                web.get("/figures", self.figures),
                web.get("/health", self.well),
                web.get("/server_info", self.well),
            ]
        )
        return app


def _end_with(task: asyncio.Task[None]) -> None:
    """End the process if a writer fails, because its readers would wait forever."""
    if not task.cancelled():
        traceback.print_exception(task.exception())
        os._exit(1)


def _reset(connection: asyncio.BaseTransport | None) -> None:
    """Reset a connection, as if the machine went down: data that was not sent is lost."""
    if isinstance(connection, asyncio.Transport):
        connection.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.abort()


def split(ids: Sequence[int]) -> tuple[tuple[int, ...], list[list[int]]]:
    """Return the question's tokens and the tokens of each turn. The last turn is the one to continue."""
    end = ids.index(QUESTION_ENDS) + 1 if QUESTION_ENDS in ids else len(ids)
    said: list[list[int]] = [[]]
    for token in ids[end:]:
        if token == SEPARATOR:
            said.append([])
        else:
            said[-1].append(token)
    return tuple(ids[:end]), said


def digest_of(folder: Path) -> str:
    """Return a digest of the files of a folder."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def number_of(prompt: Sequence[int]) -> int:
    """Return the number that the digits of a question form."""
    return int("".join(str(token) for token in prompt if token < 10) or "0")


def main() -> None:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ports", type=int, nargs="+", help="one engine each")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every answer, without --lengths")
    parser.add_argument("--lengths", type=json.loads, help="asyncrl.extensions.plan.lengths.Lengths, as JSON")
    parser.add_argument(
        "--growth", type=float, nargs=2, default=(1.0, 1.0), help="factor by which lengths grow, over so many versions"
    )
    parser.add_argument(
        "--shape", type=json.loads, default={}, help="EngineShape (asyncrl/extensions/plan/engine.py), as JSON"
    )
    parser.add_argument("--interval", type=int, default=8, help="tokens of a piece")
    parser.add_argument("--host", default="127.0.0.1", help="loopback address to listen on")
    parser.add_argument("--loaded", type=Path, help="file for the digests of the weights that they load")
    parser.add_argument("--core", type=int, help="processor to run on")
    parser.add_argument("--start-after", type=float, default=0.0, help="seconds until it listens")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    episodes = Lengths(**options.lengths).episodes() if options.lengths else None

    def tokens(prompt: Sequence[int], sibling: int, turn: int) -> int:
        return int(episodes(number_of(prompt))[sibling].turns[turn]) if episodes else options.tokens

    def growth(version: str) -> float:
        factor, versions = options.growth
        return float(factor ** min(1.0, int(version if version.isdigit() else 0) / versions))

    asked = Counter[tuple[int, ...]]()

    def siblings(prompt: Sequence[int]) -> int:
        asked[tuple(prompt)] += 1
        return (asked[tuple(prompt)] - 1) % options.lengths["group_size"]

    # as in engine/serve.py: the label of weights that are not from the run
    version = os.environ.get("ASYNCRL_INCARNATION") or "0"
    time.sleep(options.start_after)
    shape, counted = EngineShape(**options.shape), siblings if options.lengths else None

    def engine() -> Stub:
        return Stub(shape, tokens, options.interval, version, growth, counted, options.loaded)

    asyncio.run(serve(options.host, options.ports, engine))


async def serve(host: str, ports: Sequence[int], engine: Callable[[], Stub]) -> None:
    """Serve until cancelled."""
    for port in ports:
        runner = web.AppRunner(engine().app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, host, port, backlog=65535).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
