"""Benchmark of the effect of updates on running requests of multi-turn episodes, by pause mode and prefix-cache key.

A real engine (SmolLM2-135M) answers episodes of several turns while versions are published; each line gives tokens per
second, the pause, the tokens that were computed again or thrown away, and the difference between the engine's
log-probabilities and those that transformers computes with the weights of each token's version. It prints a table and
one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from asyncrl.engine.client import ClientSettings, GenerationClient  # noqa: E402
from asyncrl.engine.stream import GenerateEndpoint  # noqa: E402
from asyncrl.schema import Completion  # noqa: E402
from scripts import machine  # noqa: E402
from tests.integration.fleet import Engines, engines  # noqa: E402
from tests.integration.publisher import SeededWeights, Sender, make, publish  # noqa: E402

WAYS = (
    ("in_place", "version"),
    ("in_place", "group"),
    ("retract", "version"),
    ("abort", "version"),
    ("drain", "version"),
)
TURNS, TOKENS, OBSERVATION = 3, 32, 8
CHANGED = 2e-4
"""Fraction of the weights that a version changes."""


@dataclass
class Heard:
    """Results of the episodes of one configuration."""

    turns: list[tuple[list[int], Completion]] = field(default_factory=list)
    received: int = 0
    pauses: list[float] = field(default_factory=list)
    holds: list[float] = field(default_factory=list)


async def episodes(client: GenerationClient, heard: Heard, stop: asyncio.Event, seed: int) -> None:
    """Play episodes one after the other, each of several turns with observations in between, until `stop` is set."""
    draw = random.Random(seed)
    number = 0
    while not stop.is_set():
        session = client.generate(group=f"g{seed:03d}-{number:06d}")
        number += 1
        context = [draw.randrange(1000, 20000) for _ in range(64)]
        for _ in range(TURNS):
            found = await session(context)
            heard.turns.append((context, found))
            context = [*context, *found.token_ids, *(draw.randrange(1000, 20000) for _ in range(OBSERVATION))]
        heard.received += session.received


async def publish_every(
    seconds: float, count: int, first: int, publisher: Sender, client: GenerationClient, drain: bool, heard: Heard
) -> None:
    """Publish `count` versions, each `seconds` after the previous one."""
    loop = asyncio.get_running_loop()

    held_at = 0.0

    async def hold() -> None:
        nonlocal held_at
        held_at = time.monotonic()
        client.inflight.hold()
        if drain:
            assert await client.inflight.drained(120.0), "the requests in flight did not end within 120 s"

    def release(version: int) -> None:
        client.inflight.release(version)
        heard.holds.append(time.monotonic() - held_at)

    publisher.hold = lambda: asyncio.run_coroutine_threadsafe(hold(), loop).result()
    publisher.announce = lambda version: loop.call_soon_threadsafe(release, version)
    for version in range(first, first + count):
        await asyncio.sleep(seconds)
        figures = await asyncio.to_thread(publish, publisher, version)
        heard.pauses.append(figures["pause"])


async def measured(
    fleet: Engines, weights: SeededWeights, mode: str, key: Any, first: int, options: Any
) -> dict[str, Any]:
    """Measure one configuration."""
    config = fleet.config.model_copy(
        update={"weights": fleet.config.weights.model_copy(update={"pause_mode": mode, "transport": "tensor"})}
    )
    publisher = make(config, fleet.addresses, weights, Path(fleet.folder))
    publish(publisher, first)
    client = GenerationClient(
        GenerateEndpoint(fleet.addresses.router, fleet.addresses.access, 120.0),
        ClientSettings(
            run=f"{mode}-{key}",
            max_new_tokens=TOKENS,
            temperature=1.0,
            stop_token_ids=[],
            retry_timeout=60.0,
            coalesce=True,
            cache_key=key,
            pause_mode=mode,
        ),
    )
    client.inflight.release(first)
    heard, stop = Heard(), asyncio.Event()
    began = time.monotonic()
    playing = asyncio.gather(*[episodes(client, heard, stop, seed) for seed in range(options.episodes)])
    await publish_every(options.every, options.publishes, first + 1, publisher, client, mode == "drain", heard)
    stop.set()
    await playing
    seconds = time.monotonic() - began
    figures = client.inflight.take_figures()
    await client.close()
    publisher.fleet.close()
    kept = sum(len(found.token_ids) for _, found in heard.turns)
    return {
        "tokens_per_s": kept / seconds,
        "pause_ms": statistics.mean(heard.pauses) * 1e3,
        "held_ms": statistics.mean(heard.holds) * 1e3,
        "cache_hit": figures.cached_tokens / max(1, figures.prompt_tokens),
        "refilled": figures.refilled_tokens / kept,
        "discarded": (heard.received - kept) / kept,
        "overtaken": figures.continued["overtaken"] / figures.requests,
        **gap(fleet, weights, heard.turns, options.checked),
    }


@torch.no_grad()
def gap(
    fleet: Engines, weights: SeededWeights, turns: list[tuple[list[int], Completion]], count: int
) -> dict[str, float | None]:
    """Return the mean absolute difference of log-probabilities, for turns by one version and for turns by several."""
    model = AutoModelForCausalLM.from_pretrained(fleet.addresses.model, dtype=getattr(torch, fleet.config.engine.dtype))
    chosen = {
        "gap_one": [turn for turn in turns if len(turn[1].versions) == 1],
        "gap_several": [turn for turn in turns if len(turn[1].versions) > 1],
    }
    found: dict[str, float | None] = {}
    for name, of_kind in chosen.items():
        differences: list[torch.Tensor] = []
        sample = random.Random(0).sample(of_kind, min(count, len(of_kind)))
        for version in sorted({span.version for _, answer in sample for span in answer.versions}):
            model.load_state_dict(weights.at(version), strict=False)
            for context, answer in sample:
                spans = [span for span in answer.versions if span.version == version]
                if spans:
                    logits = model(torch.tensor([context + answer.token_ids])).logits[0, len(context) - 1 : -1].float()
                    every = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
                    for span in spans:
                        served = torch.tensor(answer.logprobs[span.start : span.end])
                        differences.append((served - every[span.start : span.end]).abs())
        found[name] = float(torch.cat(differences).mean()) if differences else None
    return found


def main() -> None:
    """Measure every configuration, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two episodes, two versions")
    parser.add_argument("--episodes", type=int, default=16, help="episodes at once")
    parser.add_argument("--publishes", type=int, default=8, help="versions published")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between them")
    parser.add_argument("--checked", type=int, default=24, help="turns of each kind that are compared")
    parser.add_argument("overrides", nargs="*", help="further settings, such as engine.dtype=float32")
    options = parser.parse_args()
    if options.quick:
        options.episodes = options.publishes = 2
        options.every, options.checked = 0.5, 4
    this = machine.report()
    results: dict[str, dict[str, float | None]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        engines(Path(folder), "engine.max_total_tokens=32768", *options.overrides, experiment="count_bits") as fleet,
    ):
        weights = SeededWeights(fleet.addresses.model, share=CHANGED)
        for number, (mode, key) in enumerate(WAYS):
            first = 1 + number * (options.publishes + 1)
            results[f"{mode}, {key}"] = asyncio.run(measured(fleet, weights, mode, key, first, options))
    columns = list(next(iter(results.values())))
    table = Table("pause mode, cache key", *columns)
    for name, figures in results.items():
        table.add_row(name, *("-" if figures[column] is None else f"{figures[column]:.3g}" for column in columns))
    Console(width=160).print(table)
    short = {name: {key: v and round(v, 4) for key, v in figures.items()} for name, figures in results.items()}
    print(json.dumps({**short, "machine": this}))


if __name__ == "__main__":
    main()
