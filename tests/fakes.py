"""Small hand-made stand-ins: a configuration, records, an engine behind HTTP, a client, an agent, a task."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
from aiohttp import ClientError
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import Field

from asyncrl import config as configuration
from asyncrl.config import AuxiliaryModelConfig, Config
from asyncrl.engine.client import ClientSettings, GenerationClient
from asyncrl.engine.inflight import EngineStats
from asyncrl.engine.served import ServedWeights
from asyncrl.engine.session import GenerationSession
from asyncrl.engine.stream import GenerateEndpoint, Headers, no_headers
from asyncrl.extension import Extension, OfferedMode
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.compose import algorithm_overrides, find_further_confs
from asyncrl.launch.help import further_confs
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.main import CONF
from asyncrl.launch.placement import Node, imagined
from asyncrl.network.addresses import Access, Addresses
from asyncrl.schema import Batch, Completion, Group, Prompt, Trajectory, Turn, VersionSpan, part_of

Result = TypeVar("Result")
OPTIONS = {(file.parent.name, file.stem): file for conf in (CONF, *further_confs()) for file in conf.glob("*/*.yaml")}
"""Files of conf/ and of the recipes, by group and name."""
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
    "intermediate_size": 12,
}
MOE: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
}
"""Contents of config.json of small models: one that is dense, and one with experts."""

# --- configuration ------------------------------------------------------------------------------------------


def compose_values(*overrides: str) -> dict[str, Any]:
    """Return the values that Hydra composes, without validation."""
    return copy.deepcopy(_composed(*overrides))


def missing(name: str) -> list[str]:
    """Return the settings that an experiment requires from its user, itself or by one that it begins from."""
    text = OPTIONS["experiment", name].read_text()
    begins_from = re.findall(r"^  - (\w+)$", text, re.MULTILINE)
    own = ["model.path=/models/m", "task.train_file=/questions.jsonl"] if "override /model: folder" in text else []
    return own or [setting for other in begins_from if other != "_self_" for setting in missing(other)]


@cache
def _composed(*overrides: str) -> dict[str, Any]:
    find_further_confs()
    with initialize_config_dir(version_base=None, config_dir=str(CONF)):
        composed = compose("train", overrides=algorithm_overrides(overrides))
    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return values


@cache
def _tiny_json() -> str:
    return json.dumps(compose_values("experiment=tiny"))


def tiny_values(**changes: Any) -> dict[str, Any]:
    """The values of experiment=tiny, changed by dotted names: tiny_values(**{"rollout.lead": 1})."""
    return changed(json.loads(_tiny_json()), changes)


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values`, changed by dotted names."""
    for name, value in changes.items():
        *path, last = name.split(".")
        section = values
        for part in path:
            section = section.setdefault(part, {})  # that of an extension is not composed
        section[last] = value
    return values


def fake_rank(config: Config, run_dir: Path, parallel: Any, told: list[str]) -> Any:
    """What checkpoints see of a trainer rank; its warnings are added to `told`."""
    return SimpleNamespace(
        config=config,
        run_dir=run_dir,
        parallel=parallel,
        addresses=SimpleNamespace(run_id="run"),
        warn=lambda text, version: told.append(text),
    )


def reusing(**settings: Any) -> dict[str, Any]:
    """Changes that add the recipe sample_reuse."""
    path = "asyncrl_recipes.sample_reuse.extension:SampleReuse"
    return {"extensions": {"sample_reuse": path}, "sample_reuse": settings}


def questions_with_long_ones(folder: Path) -> dict[str, Any]:
    """Changes that ask 12 questions, of which numbers 2 and 9 have more than 4 digits."""
    path = folder / "long.jsonl"
    texts = ["12345" if number in (2, 9) else str(100 + number) for number in range(12)]
    path.write_text("".join(json.dumps({"prompt": text, "answer": text}) + "\n" for text in texts))
    return {"task.kind": "file", "task.params": {}, "task.train_file": str(path)}


class Machines(Cluster):
    """A job of several machines, which is still to be submitted unless it has nodes: then two machines, or
    cluster.nodes, are imagined. Programs print `answer`."""

    def __init__(
        self, config: Config, nodes: Sequence[Node] = (), facts: Sequence[MachineFacts] = (), answer: str = ""
    ) -> None:
        super().__init__(config)
        self.here, self.nodes, self._machines, self._answer = bool(nodes), nodes, facts, answer
        self.asked: list[dict[str, Any]] = []

    def probe(self, config: Config, ports: int | None = None) -> None:
        """Nobody is asked."""
        if not self.here:
            self.nodes = imagined(config, config.cluster.nodes or 2, config.cluster.gpus or 0)

    def everywhere(
        self, program: list[str], seconds: float, nodes: Sequence[str] | None = None, mounts: Sequence[Path] = ()
    ) -> list[str]:
        self.asked.append({"program": program, "seconds": seconds, "nodes": nodes, "mounts": mounts})
        return [self._answer]


class Clusters(Extension):
    """Adds such jobs."""

    clusters = {"machines": "tests.fakes:Machines"}  # noqa: RUF012


JOB: dict[str, Any] = {"extensions": {"clusters": "tests.fakes:Clusters"}, "cluster.launcher": "machines"}
"""Changes that make a run such a job."""


def tiny_config(**changes: Any) -> Config:
    """The same, validated. Tests of an extension are skipped where these settings need another that is deleted."""
    pytest = sys.modules.get("pytest")  # which a program that a test has started need not have
    if pytest and os.environ.get("PYTEST_CURRENT_TEST", "").startswith("tests/extensions/"):
        for missing in (name for name in _needed(changes) if not (EXTENSIONS / name).exists()):
            pytest.skip(f"the extension {missing} is not there")
    return configuration.load(tiny_values(**changes))


OFFERED: dict[str, dict[Any, str]] = {
    "weights.transport": {"disk": "files", "delta": "delta"},
    "cluster.placement": {"colocated": "colocated"},
    "algo.advantage": {"gae": "critic"},
    "record": {True: "recording"},
}
"""Extensions by what they make of a setting of the core."""
EXTENSIONS = Path(configuration.__file__).parents[1] / "extensions"


def _needed(changes: dict[str, Any]) -> Iterator[str]:
    """Yield the extensions that these settings need."""
    index = (EXTENSIONS / "README.md").read_text()
    for field, value in changes.items():
        section = field.partition(".")[0]
        if f"]({section}/README.md)" in index:
            yield section
        if field == "trainer.lora.rank" and value:
            yield "lora"
        if isinstance(value, (str, bool)) and value in OFFERED.get(field, {}):
            yield OFFERED[field][value]


class ScorerConfig(AuxiliaryModelConfig):
    """A model that is not trained, as a teacher or a judge."""

    urls: list[str] = Field(default_factory=list)

    @property
    def started(self) -> int:
        return 0 if self.urls else super().started

    @property
    def elsewhere(self) -> list[str]:
        return self.urls


class Alone(Extension):
    """Has a mode in which engines run without trainers."""

    modes = {"alone": OfferedMode()}  # noqa: RUF012


ALONE = {"mode": "alone", "extensions.alone": f"{__name__}:Alone"}


class Given(Extension):
    """Has a mode in which trainers run without engines."""

    modes = {"given": OfferedMode(trains=True)}  # noqa: RUF012


GIVEN = {"mode": "given", "extensions.given": f"{__name__}:Given"}


class Scorers(Extension):
    """Has the section `scorer`."""

    models = {"scorer": ScorerConfig}  # noqa: RUF012


def with_scorer(**changes: Any) -> Config:
    """The configuration of experiment=tiny with the section `scorer`."""
    return tiny_config(**changes, **{"extensions.scorers": f"{__name__}:Scorers"})


def addresses(engines: int = 1, gpus: int = 0, **changes: Any) -> Addresses:
    """Addresses of a run that nothing listens on."""
    values: dict[str, Any] = {
        "run_id": "run0",
        "api_key": "key0",
        "model": Path("/model"),
        "engines": tuple(f"http://127.0.0.1:{20000 + i}" for i in range(engines)),
        "router": "http://127.0.0.1:21000",
        "rollout": "http://127.0.0.1:22000",
        "gpus": gpus,
        "started_at": 0.0,
    }
    return Addresses(**(values | changes))


# --- records ------------------------------------------------------------------------------------------------


def completion(tokens: int = 2, versions: tuple[int, ...] = (0,), finish: str = "stop") -> Completion:
    """`tokens` tokens, the last ones of every version after the first being one each."""
    first = tokens - len(versions) + 1
    ends = [first, *range(first + 1, tokens + 1)]
    starts = [0, *ends[:-1]]
    spans = [VersionSpan(v, start, end) for v, start, end in zip(versions, starts, ends, strict=True)]
    return Completion(list(range(tokens)), [-0.5] * tokens, spans, finish)


def trajectory(reward: float = 0.0, **answer: Any) -> Trajectory:
    """One turn."""
    return Trajectory([Turn([], completion(**answer))], reward)


def group(
    slot: int = 0,
    rewards: Iterable[float] = (0.0, 1.0),
    prompt: list[int] | None = None,
    task: str = "length",
    **answer: Any,
) -> Group:
    """A group whose members differ in their rewards only."""
    members = [trajectory(reward, **answer) for reward in rewards]
    return Group(f"g{slot}", slot, prompt or [12, 1, 11], members, task)


# --- an engine behind HTTP ----------------------------------------------------------------------------------


def pieces(answer: Completion, index: int = 0, size: int = 2, **meta: Any) -> list[dict[str, Any]]:
    """The events that SGLang streams for one sample; `meta` changes the last one's meta_info."""
    events = []
    for start in range(0, max(1, len(answer.token_ids)), size):
        ids, logprobs = answer.token_ids[start : start + size], answer.logprobs[start : start + size]
        entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
        info: dict[str, Any] = {"id": "r", "finish_reason": None, "output_token_logprobs": entries}
        events.append({"text": "", "output_ids": ids, "meta_info": info, "index": index})
    events[-1]["meta_info"] |= {
        "finish_reason": {"type": answer.finish_reason, "matched": 10},
        "weight_versions": [{"version": str(s.version), "start": s.start, "end": s.end} for s in answer.versions],
        "prompt_tokens": 4,
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": 1,
        **meta,
    }
    return events


def stream(events: Iterable[dict[str, Any]]) -> bytes:
    """Server-sent events, as SGLang writes them."""
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


Reply = bytes | Sequence[bytes | asyncio.Event | Exception] | AsyncIterator[bytes] | httpx.Response | Exception


class FakeHttp:
    """Stand-in for aiohttp's session whose requests a function answers, with errors and responses of httpx."""

    def __init__(self, handle: Callable[[httpx.Request], Awaitable[httpx.Response]]) -> None:
        self._handle = handle

    @asynccontextmanager
    async def post(self, url: str, data: bytes, headers: dict[str, str], allow_redirects: bool) -> AsyncIterator[Any]:
        assert not allow_redirects, "prompts go to the router alone"
        try:
            response = await self._handle(httpx.Request("POST", url, content=data, headers=headers))
            stream: Any = response.stream
            try:
                yield SimpleNamespace(
                    status=response.status_code,
                    read=response.aread,
                    headers=response.headers,
                    content=SimpleNamespace(iter_any=lambda: aiter(stream)),
                )
            finally:
                await stream.aclose()
        except httpx.HTTPError as error:
            raise type(type(error).__name__, (ClientError,), {})(str(error)) from None

    async def close(self) -> None: ...


class FakeEngine:
    """Answers /generate with what `answer` makes of the request: bytes, pieces of bytes (with events to wait for and
    errors to break with between them) or an iterator of them, a whole response, or an error."""

    def __init__(self, answer: Callable[[dict[str, Any]], Reply]) -> None:
        self._answer = answer
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.routes: list[str] = []

    async def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        self.routes.append(request.headers["x-smg-routing-key"])
        answer = self._answer(body)
        if isinstance(answer, httpx.Response):
            return answer
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, AsyncIterator):
            return httpx.Response(200, content=answer)
        chunks = [answer] if isinstance(answer, bytes) else answer

        async def body_of() -> AsyncIterator[bytes]:
            for chunk in chunks:
                if isinstance(chunk, asyncio.Event):
                    await chunk.wait()
                elif isinstance(chunk, Exception):
                    raise chunk
                else:
                    yield chunk

        return httpx.Response(200, content=body_of())

    def client(self, **changes: Any) -> GenerationClient:
        """The real client in front of this engine."""
        settings: dict[str, Any] = {
            "run": "run0",
            "max_new_tokens": 8,
            "temperature": 1.0,
            "stop_token_ids": [10],
            "retry_timeout": 0.02,
            "coalesce": True,
        }
        http = changes.pop("http", FakeHttp(self.handle))
        read = {name: kind for one in changes.get("hooks", ()) for name, kind in one.reads.items()}
        endpoint = GenerateEndpoint("http://router", Access("key0"), changes.pop("timeout", 5.0), http, read)
        headers = changes.pop("headers", no_headers)
        return client_of(endpoint, settings | changes, headers)


def client_of(endpoint: GenerateEndpoint, settings: dict[str, Any], headers: Headers = no_headers) -> GenerationClient:
    """The client with these settings: what answers, as `served`, and those of ClientSettings."""
    served = settings.pop("served", None)
    return GenerationClient(endpoint, ClientSettings(**settings), headers, served)


def echo(tokens: int = 3, **meta: Any) -> Callable[[dict[str, Any]], bytes]:
    """Sample i of every request answers [i, i + 1, ...] in the version that its prefix-cache key names."""

    def answer(request: dict[str, Any]) -> bytes:
        version = int(request["extra_key"].rpartition("-v")[2])
        events: list[dict[str, Any]] = []
        for i in range(request["sampling_params"]["n"]):
            ids = list(range(i, i + tokens))
            sample = Completion(ids, [-0.1 * (t + 1) for t in ids], [VersionSpan(version, 0, tokens)], "stop")
            events += pieces(sample, index=i, **meta)
        return stream(events)

    return answer


# --- the rollout side ---------------------------------------------------------------------------------------


class FakeSession(GenerationSession):
    """Answers with what `answer` makes of the prompt's token ids; `waste` tokens more came than it keeps."""

    def __init__(
        self, client: FakeClient, answer: Callable[[list[int]], Completion], waste: int = 0, purpose: str = "training"
    ) -> None:
        super().__init__(client, "", 1.0, purpose)  # type: ignore[arg-type]
        self._answer, self._waste, self._delay = answer, waste, client.delay

    async def __call__(self, token_ids: list[int], *options: Any, **more: Any) -> Completion:
        await asyncio.sleep(self._delay)
        found = self._answer(token_ids)
        self.hear(len(found.token_ids) + self._waste)
        self._client.inflight.tokens[self.purpose] += len(found.token_ids) + self._waste
        return found


class FakeClient:
    """Stand-in with the parts of Client and its requests in flight that server and worker use."""

    def __init__(
        self, answer: Callable[[list[int]], Completion] | None = None, waste: int = 0, delay: float = 0.0
    ) -> None:
        self.delay, self.temperature = delay, 1.0
        self._answer, self._waste = answer or (lambda _: completion()), waste
        self.calls: list[object] = []
        self.in_flight, self.version, self.held, self.holding = 0, 0, 0.0, False
        self.inflight = self
        self.tokens: Counter[str] = Counter()
        self.late_tokens = 0
        self.figures = EngineStats()
        self.served = ServedWeights()

    def generate(
        self,
        temperature: float | None = None,
        *,
        group: str = "",
        purpose: str = "training",
        sample: str = "",
        pinned: int | None = None,
        born: int | None = None,
    ) -> FakeSession:
        return FakeSession(self, self._answer, self._waste, purpose)

    def closed(self, session: GenerationSession) -> None: ...

    def hold(self) -> None:
        self.calls.append("hold")

    async def confirmed(self, seconds: float | None = None) -> bool:
        return True

    async def gathered(self) -> None: ...

    async def drained(self, seconds: float) -> bool:
        await asyncio.sleep(0)
        return self.in_flight == 0

    def release(self, version: int) -> None:
        self.calls.append(version)

    def take_figures(self) -> EngineStats:
        return EngineStats(requests=1, prompt_tokens=8, cached_tokens=2, seconds_busy=0.5)


class FakeTemplate:
    """Messages are digits; a chat is <bos>, its digits and "="."""

    def __init__(self, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        self._decode = decode or (lambda ids: "".join(str(token) for token in ids if token < 10))

    def begin(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        return [12, *(int(digit) for message in messages for digit in message["content"]), 11]

    def extend(self, messages: Sequence[dict[str, Any]], *, last: int | None) -> list[int]:
        return [
            *([] if last == 10 else [10]),
            *(int(digit) for message in messages for digit in message["content"]),
            11,
        ]

    end = "<eos>"

    def encode(self, text: str, *, begins: bool = False) -> list[int]:
        return [*([12] if begins else []), *(int(digit) for digit in text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)


class LengthTask:
    """Rewards every character of an answer."""

    size, inline = None, False

    def __init__(self, worth: float = 1.0) -> None:
        self._worth = worth

    def question(self, index: int) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": str(index)}]}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        return self._worth * len(answer)

    def correct(self, reward: float) -> bool:
        return reward > 0


def prompts(task: str = "length", start: int = 0) -> Iterator[Prompt]:
    """Endless and distinct."""
    return (Prompt(f"p{i}", [12, i, 11], {}, task, i) for i in itertools.count(start))


def in_turn(*tasks: str) -> Callable[[int], Prompt]:
    """Draws from these tasks in turn. Prompts tell their task by their second token: 0, 1, ... of the first, 1000, ...
    of the next."""
    streams = itertools.cycle([prompts(name, 1000 * i) for i, name in enumerate(tasks)])
    return lambda version: next(next(streams))


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Let the event loop run until something holds; AssertionError when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        await asyncio.sleep(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock stands still while anything is left to do, and jumps to the next timer when nothing is.
    Timeouts then do not depend on the machine. For tests without threads and connections."""

    def __init__(self) -> None:
        super().__init__()
        self._now, select = 0.0, self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            ready = select(0)
            self._now += timeout or 0.0
            assert ready or timeout is not None, "every task waits, and none of them for a timer"
            return ready

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        """Return the seconds that have passed."""
        return self._now


def jumping(main: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in such a loop."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)


class JsonHandler(BaseHTTPRequestHandler):
    """Handler of a small real server that answers in JSON and logs nothing."""

    def answer(self, status: int, values: Any) -> None:
        """Send the answer to a request."""
        content = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        with suppress(ConnectionError):  # a client need not wait for its answer
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def in_parts(batch: Batch, parts: int) -> list[Batch]:
    """Return a batch in parts, as the rollout process hands it out."""
    bounds = [part_of(len(batch.groups), part, parts) for part in range(parts)]
    return [Batch(batch.version, batch.groups[a:b], {}, b == len(batch.groups)) for a, b in bounds]


class Clock:
    """A clock that is moved by hand."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
