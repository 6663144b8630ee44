"""Tests of versions that are adapters, on real engines behind the real router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config import Config
from asyncrl.engine.calls import CallRefused
from asyncrl.engine.client import GenerationClient
from asyncrl.engine.served import InUse
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.extensions.lora.peft import write_peft
from asyncrl.extensions.lora.peft_config import user_config
from asyncrl.extensions.lora.publish import AdapterPublisher
from asyncrl.extensions.lora.rules import LINEARS
from asyncrl.extensions.lora.served import ServedAdapters, adapter_names
from asyncrl.schema import POLICY, Completion
from tests.fakes import client_of
from tests.integration.adapters import SETTINGS, SeededAdapters, publish, publisher_of
from tests.integration.fleet import Engines, engines

pytestmark = pytest.mark.integration

PROMPT, EOS = [12, 1, 2, 3, 11], 10
Publish = Callable[[int], Awaitable[Any]]


@pytest.fixture(scope="module")
def one_fleet_with_adapters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start two engines that serve adapters behind the router."""
    with engines(tmp_path_factory.mktemp("adapters"), "engine.count=2", *SETTINGS) as started:
        yield started


@pytest.fixture
def fleet(one_fleet_with_adapters: Engines) -> Engines:
    """Return both engines, restarting any that the last test killed."""
    one_fleet_with_adapters.revive()
    return one_fleet_with_adapters


def changed(config: Config, **changes: Any) -> Config:
    """Return the configuration with changes of `weights`, or of trainer.lora, by name."""
    lora = config.trainer.lora.model_copy(update={k: v for k, v in changes.items() if hasattr(config.trainer.lora, k)})
    weights = config.weights.model_copy(update={k: v for k, v in changes.items() if hasattr(config.weights, k)})
    trainer = config.trainer.model_copy(update={"lora": lora})
    return config.model_copy(update={"trainer": trainer, "weights": weights})


def client(fleet: Engines, run: str, **changes: Any) -> GenerationClient:
    values = {
        "run": run,
        "max_new_tokens": 48,
        "temperature": 1.0,
        "stop_token_ids": [EOS],
        "retry_timeout": 30.0,
        "coalesce": False,
        "served": ServedAdapters(names=adapter_names(fleet.config, run), per=changes.pop("per", "completion")),
    }
    endpoint = GenerateEndpoint(fleet.addresses.router, fleet.addresses.access, 60.0)
    return client_of(endpoint, {**values, **changes})


def played(
    fleet: Engines,
    folder: Path,
    run: str,
    play: Callable[[GenerationClient, Publish], Awaitable[Any]],
    *,
    config: Config | None = None,
    weights: SeededAdapters | None = None,
    prepare: Callable[[AdapterPublisher], None] = lambda publisher: None,
    **settings: Any,
) -> Any:
    """Run `play` with a client and a function that publishes a version in a thread, as the trainer would."""

    async def main() -> Any:
        made, loop = client(fleet, run, **settings), asyncio.get_running_loop()

        async def tell(version: int) -> InUse:
            made.inflight.release(version)
            return made.inflight.served.in_use(version)

        def announce(version: int) -> InUse:
            return asyncio.run_coroutine_threadsafe(tell(version), loop).result(120)

        seeded = weights or SeededAdapters(fleet)
        with publisher_of(config or fleet.config, fleet.addresses, seeded, folder, run=run, announce=announce) as one:
            prepare(one)
            try:
                return await play(made, lambda version: asyncio.to_thread(publish, one, seeded, version))
            finally:
                await made.close()

    return asyncio.run(main())


def gap(fleet: Engines, weights: SeededAdapters, version: int, found: Completion, scale: float = 2.0) -> float:
    """Return the largest difference of a completion's log-probabilities from those of transformers with the merged
    weights of a version."""
    model = AutoModelForCausalLM.from_pretrained(fleet.addresses.model, dtype=torch.float32)
    model.load_state_dict(weights.merged(version, scale), strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + found.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    every = logits.log_softmax(-1).gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
    return (every - torch.tensor(found.logprobs)).abs().max().item()


def versions_of(completion: Completion) -> list[int]:
    return [span.version for span in completion.versions]


def loaded(fleet: Engines, number: int = 0) -> set[str]:
    """Return the names of the adapters that an engine holds."""
    answer = httpx.get(f"{fleet.addresses.engines[number]}/v1/models", **fleet.addresses.access.http)
    return {card["id"] for card in answer.json()["data"] if card["parent"]}


async def several(made: GenerationClient, count: int = 4) -> list[Completion]:
    return list(await asyncio.gather(*[made.generate()(PROMPT) for _ in range(count)]))


CASES: dict[str, dict[str, Any]] = {
    "shared memory": {"transport": "tensor"},
    "folder": {"transport": "disk"},
    "rslora": {"rslora": True},
    "queries and values": {"targets": ["q_proj", "v_proj"]},
    "gate": {"targets": ["gate_proj"]},
    "down and output": {"targets": ["down_proj", "o_proj"]},
}


@pytest.mark.parametrize("case", CASES)
def test_engines_compute_what_the_merged_weights_compute(fleet: Engines, tmp_path: Path, case: str) -> None:
    """SGLang ignores use_rslora, and fills in what a fused projection lacks."""
    config = changed(fleet.config, **CASES[case])
    scale, targets = config.trainer.lora.scale, CASES[case].get("targets", LINEARS)
    weights = SeededAdapters(fleet, targets)

    async def play(made: GenerationClient, publish: Publish) -> Any:
        found = [await several(made)]
        for version in (1, 2):
            await publish(version)
            found.append(await several(made))
        return found

    run = f"equal-{case.replace(' ', '-')}"
    found = played(fleet, tmp_path, run, play, config=config, weights=weights)
    for version, completions in enumerate(found):
        assert {span.version for one in completions for span in one.versions} == {version}
        assert max(gap(fleet, weights, version, one, scale) for one in completions) < 1e-4
        assert max(gap(fleet, weights, (version + 1) % 3, one, scale) for one in completions) > 1e-2


def test_requests_keep_their_adapter_through_publishes(fleet: Engines, tmp_path: Path) -> None:
    """Requests follow each other until both publishes are over, so that some are in flight on any machine."""

    async def play(made: GenerationClient, publish: Publish) -> Any:
        await publish(1)
        found, over = list[tuple[Completion, int]](), asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                completion = await made.generate()(PROMPT)
                found.append((completion, made.inflight.version))

        asking = [asyncio.create_task(ask()) for _ in range(64)]
        await asyncio.sleep(0.02)
        await publish(2)
        await publish(3)
        over.set()
        await asyncio.gather(*asking)
        return found, made.inflight.figures

    found, figures = played(fleet, tmp_path, "flight", play, stop_token_ids=[])
    assert all(len(versions_of(one)) == 1 for one, _ in found)
    crossed = [one for one, served in found if versions_of(one)[0] < served]
    assert crossed, "no answer ended after a publish that began before it"
    assert figures.continued.total() == 0
    weights = SeededAdapters(fleet)
    assert max(gap(fleet, weights, versions_of(one)[0], one) for one in crossed[:6]) < 1e-4


def test_unused_adapter_is_unloaded_and_its_name_not_reused(fleet: Engines, tmp_path: Path) -> None:
    run, config = "unload", changed(fleet.config, transport="disk")

    async def play(made: GenerationClient, publish: Publish) -> Any:
        episode = made.generate()
        await publish(1)
        turns, held = [await episode(PROMPT)], []
        for version in (2, 3):
            await publish(version)
            held.append(loaded(fleet))
        turns.append(await episode(PROMPT))
        episode.close()
        sessions = [made.generate(group="siblings") for _ in range(12)]
        answers = [asyncio.ensure_future(session(PROMPT)) for session in sessions[:4]]
        await asyncio.gather(*answers)
        cancelled = [asyncio.ensure_future(session(PROMPT)) for session in sessions[4:]]
        await asyncio.sleep(0.01)
        for one in cancelled:
            one.cancel()
        await asyncio.wait(cancelled)
        for session in sessions:
            session.close()
        await asyncio.sleep(0)
        await publish(4)
        return turns, [*held, loaded(fleet)]

    turns, held = played(fleet, tmp_path, run, play, config=config, per="episode", coalesce=True)
    assert [versions_of(one) for one in turns] == [[1], [1]]
    assert gap(fleet, SeededAdapters(fleet), 1, turns[1]) < 1e-4
    assert held == [{f"{run}-v1", f"{run}-v2"}, {f"{run}-v1", f"{run}-v3"}, {f"{run}-v4"}]
    assert {file.name for file in tmp_path.iterdir()} == {f"{run}-v4"}
    assert generate(fleet, 0, f"{run}-v1").status_code == 400


def generate(fleet: Engines, number: int, adapter: str) -> httpx.Response:
    """Ask one engine without the router."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}, "lora_path": adapter}
    url = f"{fleet.addresses.engines[number]}/generate"
    return httpx.post(url, json=body, timeout=120.0, **fleet.addresses.access.http)


def test_restarted_engine_gets_live_adapters_before_requests(fleet: Engines, tmp_path: Path) -> None:
    run, second = "killed", fleet.addresses.engines[1]
    made_by: list[AdapterPublisher] = []

    async def play(made: GenerationClient, publish: Publish) -> Any:
        publisher = made_by[0]
        episode = made.generate()
        await publish(1)
        await episode(PROMPT)
        running = asyncio.gather(*[made.generate()(PROMPT) for _ in range(24)])
        await asyncio.sleep(0.02)
        fleet.kill("engine-1")
        publisher._fleet.lose(second, "killed")
        found = await running
        await publish(2)
        await asyncio.to_thread(fleet.start, "engine-1")
        await asyncio.to_thread(fleet.wait_for, second)
        refused = generate(fleet, 1, f"{run}-v1").status_code
        publisher._fleet.join(second)
        await publish(2)
        return found, refused, loaded(fleet, 1), await several(made, 8), await episode(PROMPT)

    found, refused, held, after, turn = played(fleet, tmp_path, run, play, prepare=made_by.append, per="episode")
    assert {tuple(versions_of(one)) for one in found} == {(1,)}
    assert refused == 400
    assert held == {f"{run}-v1", f"{run}-v2"}
    assert {tuple(versions_of(one)) for one in after} == {(2,)}
    assert versions_of(turn) == [1]


def test_leftovers_of_a_dead_trainer_go_when_joining_the_next(fleet: Engines, tmp_path: Path) -> None:
    """A trainer that is killed in the middle of a publish has loaded an adapter that was never announced."""

    def die(version: int) -> InUse:
        raise KeyboardInterrupt

    weights = SeededAdapters(fleet)
    with (
        publisher_of(fleet.config, fleet.addresses, weights, tmp_path, run="first", announce=die, tidy=False) as killed,
        pytest.raises(KeyboardInterrupt),
    ):
        publish(killed, weights, 1)
    assert "first-v1" in loaded(fleet)

    async def play(made: GenerationClient, publish: Publish) -> Any:
        await publish(1)
        return loaded(fleet), await several(made)

    def attach(publisher: AdapterPublisher) -> None:
        publisher._fleet.joining, publisher._fleet.serving = publisher._fleet.serving, []

    held, found = played(fleet, tmp_path, "second", play, prepare=attach)
    assert held == {"second-v1"}
    assert {tuple(versions_of(one)) for one in found} == {(1,)}


def test_engine_refuses_a_name_that_is_taken(fleet: Engines, tmp_path: Path) -> None:
    """Names are therefore never reused: the server would keep the old adapter."""
    weights = SeededAdapters(fleet)
    with publisher_of(fleet.config, fleet.addresses, weights, tmp_path, run="taken") as publisher:
        publish(publisher, weights, 1)
        path, body = publisher._live[1, POLICY].load(verify=True)
        with pytest.raises(CallRefused, match="already"):
            publisher._fleet.post(fleet.addresses.engines[0], path, body)


def test_an_engine_serves_the_folder_that_a_run_exports(fleet: Engines, tmp_path: Path) -> None:
    weights, folder = SeededAdapters(fleet), tmp_path / "hf"
    weights.version = 1
    tensors, http = dict(weights.adapters()), {**fleet.addresses.access.http, "timeout": 120.0}
    write_peft(folder, user_config(fleet.config.trainer.lora, tensors, str(fleet.addresses.model)), tensors.items())

    def post(path: str, **body: object) -> Any:
        answer = httpx.post(f"{fleet.addresses.engines[0]}{path}", json=body, **http)
        assert answer.status_code == 200, answer.text
        return answer.json()

    post("/load_lora_adapter", lora_name="exported", lora_path=str(folder))
    try:
        sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
        answer = post(
            "/generate", input_ids=PROMPT, sampling_params=sampling, return_logprob=True, lora_path="exported"
        )
    finally:
        post("/unload_lora_adapter", lora_name="exported")
    found = [(logprob, token) for logprob, token, _ in answer["meta_info"]["output_token_logprobs"]]
    logprobs, tokens = ([*column] for column in zip(*found, strict=True))
    completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
    assert gap(fleet, weights, 1, completion) < 1e-4  # type: ignore[arg-type]
    assert gap(fleet, weights, 0, completion) > 1e-2  # type: ignore[arg-type]
