"""A server that speaks /generate as SGLang does, with made-up tokens at a given pace: our own cost becomes visible.

For benchmarks and fault campaigns beside the real engine, never in its place. `python scripts/stub_engine.py --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import msgspec
from aiohttp import web

encode = msgspec.json.Encoder().encode


class Stub:
    """Every answer has `tokens` tokens, in pieces of `interval`, one every `interval * pace` seconds."""

    def __init__(self, tokens: int, interval: int, pace: float) -> None:
        self._tokens, self._interval, self._pace = tokens, interval, pace
        self.in_flight = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Samples of one request stream side by side."""
        body = msgspec.json.decode(await request.read())
        sampling = body["sampling_params"]
        tokens = min(self._tokens, sampling["max_new_tokens"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.in_flight += 1
        try:
            began = asyncio.get_running_loop().time()
            for start in range(0, tokens, self._interval):
                end = min(tokens, start + self._interval)
                for index in range(sampling["n"]):
                    await response.write(b"data: " + encode(piece(start, end, tokens, index)) + b"\n\n")
                if end < tokens and self._pace:
                    await asyncio.sleep(began + end * self._pace - asyncio.get_running_loop().time())
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.in_flight -= 1
        return response

    async def figures(self, _: web.Request) -> web.Response:
        """How many requests are open."""
        return web.json_response({"in_flight": self.in_flight})


def piece(start: int, end: int, tokens: int, index: int) -> dict[str, Any]:
    """One event; the last one tells the versions."""
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": None,
        "output_token_logprobs": [[-0.5, 7, None]] * (end - start),
    }
    if end == tokens:
        meta |= {
            "finish_reason": {"type": "length", "length": tokens},
            "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
            "prompt_tokens": 4,
            "completion_tokens": tokens,
            "cached_tokens": 0,
        }
    return {"text": "", "output_ids": [7] * (end - start), "meta_info": meta, "index": index}


def main() -> None:
    """Serve until ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--interval", type=int, default=8, help="tokens of a piece")
    parser.add_argument("--pace", type=float, default=0.02, help="seconds per token")
    parser.add_argument("--core", type=int, help="processor to run on")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    stub = Stub(options.tokens, options.interval, options.pace)
    app = web.Application()
    app.add_routes([web.post("/generate", stub.generate), web.get("/figures", stub.figures)])
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None, backlog=65535)


if __name__ == "__main__":
    main()
