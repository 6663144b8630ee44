"""Benchmark of the OpenAI proxy: CPU time of a call in the rollout process, minus that of the same call through Chat.

    python scripts/bench_proxy.py [--quick] [--turns 8] [--episodes 96]

The engine answers immediately. First, clients in another process send prepared requests, so that only the proxy is
measured; then OpenAI's client runs in the same process, as with extensions.proxy.agents:Proxied.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAioHttpClient

sys.path.insert(0, str(Path(__file__).parent.parent))

from asyncrl.agents.chat import Chat
from asyncrl.agents.template import ChatTemplate
from asyncrl.extensions.proxy.server import Proxy
from asyncrl.models import tiny
from asyncrl.rollout.parts import load_tokenizer
from asyncrl.schema import Completion, Message, Template, VersionSpan
from scripts import machine

CONCURRENT = 32
CLIENT = """
import asyncio, json, sys
host, port, keys, bodies = json.load(sys.stdin)

async def play(key):
    reader, writer = await asyncio.open_connection(host, port)
    for body in bodies:
        head = f"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\nauthorization: Bearer {key}\\r\\n"
        writer.write(f"{head}content-length: {len(body)}\\r\\n\\r\\n{body}".encode())
        head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode().lower()
        await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
        assert " 200 " in head.splitlines()[0], head
    writer.close()

async def main():
    await asyncio.gather(*map(play, keys))

asyncio.run(main())
"""


class Instant:
    """Engine that gives the same answer to every request immediately."""

    temperature = 1.0

    def __init__(self, template: Template, tokens: int) -> None:
        self.template = template
        self._answer = [3] * tokens + [10]

    async def images(self, messages: Sequence[Message]) -> list[bytes]:
        raise NotImplementedError("the benchmark shows no images")

    async def __call__(self, token_ids: list[int], **options: Any) -> Completion:
        length = len(self._answer)
        return Completion(list(self._answer), [-0.5] * length, [VersionSpan(0, 0, length)], "stop")


class Bench:
    """Benchmark with episodes of a given number of turns, in messages of a given number of tokens."""

    def __init__(self, template: Template, turns: int, tokens: int, proxy: Proxy, client: AsyncOpenAI) -> None:
        self._generate, self._proxy, self._client = Instant(template, tokens), proxy, client
        said, answered = {"role": "user", "content": "5" * tokens}, {"role": "assistant", "content": "3" * tokens}
        self._said = said["content"]
        self._histories: list[Any] = [[*[said, answered] * turn, said] for turn in range(turns)]

    async def measure(self, play: Callable[[int], Awaitable[None]], episodes: int) -> float:
        """Return the CPU time of a call in microseconds: the minimum of three runs, to exclude the influence of other
        processes."""
        found = []
        for _ in range(3):
            began = time.process_time()
            await play(episodes)
            found.append((time.process_time() - began) / (episodes * len(self._histories)) * 1e6)
        return min(found)

    async def chat(self, episodes: int) -> None:
        for _ in range(episodes):
            chat = Chat(self._generate, self._histories[0])
            await chat.answer()
            for _ in self._histories[1:]:
                chat.say(self._said)
                await chat.answer()

    async def proxied(self, episodes: int) -> None:
        host, port = self._proxy.base_url.split("/")[2].split(":")
        bodies = [json.dumps({"model": "m", "messages": history}) for history in self._histories]
        for first in range(0, episodes, CONCURRENT):
            async with AsyncExitStack() as stack:
                opened = [self._proxy.session(self._generate) for _ in range(min(CONCURRENT, episodes - first))]
                keys = [(await stack.enter_async_context(session)).key for session in opened]
                client = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, stdin=subprocess.PIPE)
                await client.communicate(json.dumps([host, int(port), keys, bodies]).encode())
                assert client.returncode == 0

    async def with_openai(self, episodes: int) -> None:
        for _ in range(episodes):
            async with self._proxy.session(self._generate) as session:
                client = self._client.with_options(api_key=session.key)
                for history in self._histories:
                    await client.chat.completions.create(model="m", messages=history)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="an eighth of the episodes")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=96)
    options = parser.parse_args()
    episodes = options.episodes // 8 if options.quick else options.episodes
    figures: dict[str, Any] = {"machine": machine.report()}
    folder = Path(tempfile.mkdtemp()) / "tiny"
    tiny.write(folder)
    template, proxy = ChatTemplate(load_tokenizer(folder, None)), Proxy()
    proxy.start()
    print("microseconds of CPU a call")
    print("tokens of a message     Chat   the proxy, beyond it   OpenAI's client and the proxy, beyond it")
    async with AsyncOpenAI(base_url=proxy.base_url, api_key="x", http_client=DefaultAioHttpClient()) as client:
        for tokens in (16, 256, 2048):
            bench = Bench(template, options.turns, tokens, proxy, client)
            chat, proxied, openai = [
                await bench.measure(play, episodes) for play in (bench.chat, bench.proxied, bench.with_openai)
            ]
            found = {"chat": chat, "proxy": proxied - chat, "openai": openai - chat}
            figures[str(tokens)] = {name: round(value, 1) for name, value in found.items()}
            print(f"{tokens:19d} {chat:8.0f} {proxied - chat:22.0f} {openai - chat:40.0f}")
    await proxy.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    asyncio.run(main())
