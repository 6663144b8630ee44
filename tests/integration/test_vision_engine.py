"""A real engine of a model that sees, through our client, against transformers on the same folder."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from asyncrl.engine.client import GenerationClient
from asyncrl.engine.stream import GenerateEndpoint
from asyncrl.extensions.lora.served import ServedAdapters, adapter_names
from asyncrl.extensions.vision.decoder import DecodingProcesses
from asyncrl.extensions.vision.fitting import ImageSizes
from asyncrl.extensions.vision.reader import ImageTokens, Vision
from asyncrl.extensions.vision.sizes import forbidden_ids, image_shape
from asyncrl.extensions.vision.tiny import MARKS, TOKENS, write
from asyncrl.images import data_url
from asyncrl.schema import Completion
from tests.fakes import client_of
from tests.integration import adapters, publisher
from tests.integration.fleet import Engines, engines, settings
from tests.integration.vision import ADAPTERS
from tests.weights.models import as_published

pytestmark = pytest.mark.integration

START, END, PLACEHOLDER, VIDEO = (TOKENS.index(mark) for mark in MARKS)
IMAGE = [START, PLACEHOLDER, END]
ASK = [TOKENS.index(character) for character in "what?="]
CLOSE = 2e-5
"""Largest difference of log-probabilities: answers are drawn anew each time, and 1.0e-5 was seen. Those of another
image or adapter differ by more than 1e-3."""
SETTINGS = (
    *("model=tiny_vision", "engine.max_total_tokens=4096", "engine.max_running_requests=64"),
    *("vision.tower=trained", *adapters.SETTINGS, "+agents.roles.checker.adapter=second"),
    "+agents.roles.writer.adapter=policy",
)
"""Engines cache no images, and serve two adapters. (A run trains either a tower or adapters.)"""
Play = Callable[[GenerationClient], Awaitable[Any]]


@pytest.fixture(scope="module", params=["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.campaign)])
def fleet(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("vision")
    write(folder / "model", request.param, spread=0.15)
    with engines(folder, *SETTINGS, f"model.path={folder / 'model'}") as started:
        yield started


def noise(seed: int, size: tuple[int, int] = (56, 56)) -> bytes:
    pixels = torch.randint(0, 256, (size[1], size[0], 3), generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(file, "PNG")
    return file.getvalue()


def played(fleet: Engines, play: Play, **changes: Any) -> Any:
    """Run `play` with a client of the engine."""
    hf = json.loads((fleet.addresses.model / "config.json").read_text())
    shape = image_shape(hf)
    assert shape is not None
    values = {
        "run": f"vision-{play.__qualname__}",
        "max_new_tokens": 24,
        "temperature": 1.0,
        "stop_token_ids": [],
        "retry_timeout": 60.0,
        "coalesce": True,
        "images": Vision(
            ImageTokens(START, PLACEHOLDER, END, forbidden(hf), shape, most=4),
            DecodingProcesses(ImageSizes(shape.side, 784, 16 * 784), 1 << 20),
            most_tokens=16,
        ),
        **changes,
    }

    async def main() -> Any:
        endpoint = GenerateEndpoint(fleet.addresses.router, fleet.addresses.access, 60.0)
        client = client_of(endpoint, values)
        try:
            return await asyncio.wait_for(play(client), 600.0)
        finally:
            await client.close()

    return asyncio.run(main())


def forbidden(hf: dict[str, Any]) -> list[int]:
    """Return the tokens that no answer may hold; without the one that ends an answer, all have their full length."""
    return [*forbidden_ids(hf), TOKENS.index("<|im_end|>")]


@cache
def reference(folder: Path) -> tuple[Any, Any]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    return model, Qwen2VLImageProcessorPil.from_pretrained(folder)


@torch.no_grad()
def expected(folder: Path, context: Sequence[int], images: Sequence[bytes], answer: Completion) -> torch.Tensor:
    """Return transformers' log-probabilities of an answer, without the tokens that must not be sampled."""
    model, processor = reference(folder)
    opened = [Image.open(io.BytesIO(png)) for png in images]
    seen = processor(images=opened, return_tensors="pt") if opened else {}
    tokens = iter((seen["image_grid_thw"].prod(-1) // 4).tolist() if seen else [])
    short = [*context, *answer.token_ids]
    ids = torch.tensor([one for token in short for one in [token] * (next(tokens) if token == PLACEHOLDER else 1)])[
        None
    ]
    logits = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == PLACEHOLDER).int(), **seen
    ).logits[0]
    logits[:, forbidden(model.config.to_dict())] = -torch.inf
    count = len(answer.token_ids)
    return logits[-count - 1 : -1].log_softmax(-1).gather(1, ids[0, -count:, None])[:, 0]


def difference(
    fleet: Engines, context: Sequence[int], images: Sequence[bytes], answer: Completion, folder: Path | None = None
) -> float:
    """Return the largest difference of log-probabilities from those of transformers on a folder, the engine's first one
    by default."""
    want = expected(folder or fleet.addresses.model, context, images, answer)
    return (torch.tensor(answer.logprobs) - want).abs().max().item()


def with_weights(fleet: Engines, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a folder like the engine's with other weights, and return it."""
    shutil.copytree(fleet.addresses.model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_log_probabilities_are_those_of_transformers(fleet: Engines) -> None:
    """One image, two of different sizes, no image, and a second turn with another image."""
    small, wide, other = noise(0), noise(1, (84, 56)), noise(2)
    two = [*ASK, *IMAGE, *ASK, *IMAGE, *ASK]

    async def play(client: GenerationClient) -> None:
        for context, images in (([*IMAGE, *ASK], [small]), (two, [small, wide]), (ASK, [])):
            answer = await client.generate(group="g")(context, images=images)
            assert len(answer.token_ids) == 24
            assert difference(fleet, context, images, answer) < CLOSE, images
            context = [*context, *answer.token_ids, *IMAGE, *ASK]
            second = await client.generate(group="g")(context, images=[*images, other])
            assert difference(fleet, context, [*images, other], second) < CLOSE

    played(fleet, play)
    assert "image data items" not in fleet.log("engine-0")  # SGLang's warning about a warm-up that shows no image


def test_siblings_share_a_request_unless_images_differ(fleet: Engines) -> None:
    """One image, and two."""
    images, second = [noise(3), noise(4)], noise(11)

    async def play(client: GenerationClient) -> None:
        for context, more in (([*IMAGE, *ASK], []), ([*IMAGE, *ASK, *IMAGE, *ASK], [second])):
            asking = [client.generate(group="same")(context, images=[one, *more]) for one in images for _ in range(3)]
            answers = await asyncio.gather(*asking)
            assert await client.inflight.drained(60.0)
            assert client.inflight.take_figures().requests == 2
            for place, answer in enumerate(answers):
                assert difference(fleet, context, [images[place // 3], *more], answer) < CLOSE
                assert difference(fleet, context, [images[1 - place // 3], *more], answer) > 1e-3

    played(fleet, play)


def test_answers_that_were_cut_short_continue_with_their_image(fleet: Engines) -> None:
    """An abort in the engine and the death of the router each cost no token."""
    context, image, length = [*IMAGE, *ASK], noise(5), 400

    async def abort() -> None:
        async with httpx.AsyncClient(**fleet.addresses.access.http) as http:
            await http.post(f"{fleet.addresses.engines[0]}/abort_request", json={"abort_all": True})

    async def restart() -> None:
        fleet.kill("router")
        fleet.revive()

    for cause, fault in (("aborted", abort), ("broken", restart)):

        async def play(client: GenerationClient, cause: str = cause, fault: Callable[[], Any] = fault) -> None:
            for _ in range(4):  # where others work, too, the answer may end before the fault
                session = client.generate(group="g")
                asking = asyncio.ensure_future(session(context, images=[image]))
                while session.received < 20:  # noqa: ASYNC110  nothing tells
                    await asyncio.sleep(0.002)
                await fault()
                answer = await asking
                if client.inflight.figures.continued[cause]:
                    break
            assert client.inflight.figures.continued[cause] == 1
            assert len(answer.token_ids) == length
            assert difference(fleet, context, [image], answer) < CLOSE

        played(fleet, play, max_new_tokens=length, retry_timeout=300.0)


def test_placeholders_are_never_sampled(fleet: Engines) -> None:
    async def play(client: GenerationClient) -> None:
        answer = await client.generate(group="g")([*IMAGE, *ASK], 400, images=[noise(6)])
        assert not {START, END, PLACEHOLDER, VIDEO} & set(answer.token_ids)
        whole = await client.generate(group="g")([*IMAGE, *ASK], 400, images=[noise(6)])
        assert not {START, END, PLACEHOLDER, VIDEO} & set(whole.token_ids)

    played(fleet, play, max_new_tokens=400)


def test_the_engine_survives_what_the_client_refuses(fleet: Engines) -> None:
    """Expanded placeholders, placeholders without an image, and too many images never reach the engine."""
    image = noise(7)
    refused = {
        "4 placeholders (token": ([START, *[PLACEHOLDER] * 4, END, *ASK], [image]),
        "1 placeholders (token": ([*IMAGE, *ASK], []),
        "for 2 images": ([*IMAGE, *ASK], [image, image]),
        "vision.max_images=4": (IMAGE * 5, [image] * 5),
    }

    async def play(client: GenerationClient) -> None:
        for why, (context, images) in refused.items():
            with pytest.raises(ValueError, match=why.replace("(", r"\(")):
                await client.generate(group="g")(context, images=images)
        answer = await client.generate(group="g")([*IMAGE, *ASK], images=[image])
        assert difference(fleet, [*IMAGE, *ASK], [image], answer) < CLOSE

    played(fleet, play)


def test_wrong_placeholders_cost_the_engine_nothing(fleet: Engines) -> None:
    """Requests that do not come from our client get an error at once. With two threads for images, which is SGLang's
    default, they would never return."""
    url, image = fleet.addresses.engines[0], noise(8)
    request = {"input_ids": [*IMAGE, *IMAGE, *ASK], "image_data": [data_url(image)]}
    answer = httpx.post(f"{url}/generate", json=request, timeout=120.0, **fleet.addresses.access.http)
    assert answer.status_code >= 400, answer.text

    async def play(client: GenerationClient) -> None:
        answer = await client.generate(group="g")([*IMAGE, *ASK], images=[image])
        assert difference(fleet, [*IMAGE, *ASK], [image], answer) < CLOSE

    played(fleet, play)


def test_adapters_of_roles_answer_with_their_own_weights(fleet: Engines, tmp_path: Path) -> None:
    """Each of two roles reads the same image with its own adapter, and a third one without."""
    context, image, run = [*IMAGE, *ASK], noise(9), "vision-roles"
    seeded = {name: adapters.SeededAdapters(fleet, seed=100 * seed, size=0.1) for seed, name in enumerate(ADAPTERS)}
    scale = fleet.config.trainer.lora.scale
    folders = {name: with_weights(fleet, tmp_path / name, one.merged(1, scale)) for name, one in seeded.items()}

    async def play(client: GenerationClient) -> None:
        with adapters.publisher_of(
            fleet.config, fleet.addresses, seeded["policy"], tmp_path, run=run, others={"second": seeded["second"]}
        ) as publisher:
            seeded["second"].version = 1
            await asyncio.to_thread(adapters.publish, publisher, seeded["policy"], 1)
            client.inflight.release(1)
            session = client.generate(group="g")
            for role, own, other in (("writer", "policy", "second"), ("checker", "second", "policy")):
                answer = await session(context, images=[image], role=role)
                assert difference(fleet, context, [image], answer, folders[own]) < CLOSE
                assert difference(fleet, context, [image], answer, folders[other]) > 1e-3
                assert difference(fleet, context, [image], answer) > 1e-3

    served = ServedAdapters(fleet.config.agents, adapter_names(fleet.config, run))
    played(fleet, play, run=run, served=served)


def test_stacked_experts_answer_as_transformers_does(tmp_path: Path) -> None:
    """The publish is verified by the checksums of all parameters of the text model."""
    model, context, image = tmp_path / "model", [*IMAGE, *ASK], noise(12)
    write(model, "qwen3_vl_moe", spread=0.15)
    as_published(model, "qwen3_vl_moe")
    with engines(tmp_path, "model=tiny_vision", "engine.max_total_tokens=4096", f"model.path={model}") as fleet:
        weights = publisher.SeededWeights(model)
        whole = weights._base
        weights._base = {name: tensor for name, tensor in whole.items() if "visual." not in name}
        new = with_weights(fleet, tmp_path / "new", {**whole, **weights.at(1)})
        config = settings(fleet.config, transport="tensor", verify_every=1)

        async def play(client: GenerationClient) -> None:
            session = client.generate(group="g")
            answer = await session(context, images=[image])
            assert difference(fleet, context, [image], answer) < CLOSE
            publishing = publisher.make(config, fleet.addresses, weights, tmp_path / "publish")
            with closing(publishing.fleet), closing(publishing.fleet._router._http):
                assert (await asyncio.to_thread(publisher.publish, publishing, 1))["engines"] == 1
            client.inflight.release(1)
            answer = await session(context, images=[image])
            assert difference(fleet, context, [image], answer, new) < CLOSE
            assert difference(fleet, context, [image], answer) > 1e-3

        played(fleet, play)


def test_reread_image_is_encoded_by_the_newest_tower(fleet: Engines, tmp_path: Path) -> None:
    """SGLang keeps the embeddings of images through updates unless SGLANG_VLM_CACHE_SIZE_MB is 0. This test changes the
    engine's weights, so it is the last."""
    context, image, weights = [*IMAGE, *ASK], noise(10), publisher.SeededWeights(fleet.addresses.model)
    trained = {name: tensor for name, tensor in weights.at(1).items() if "visual." in name}
    weights._base |= trained  # text model of version 0, tower of version 1
    folder = with_weights(fleet, tmp_path / "trained", weights._base)
    known = "qwen2_5_vl" in (folder / "config.json").read_text()  # how the engine lays its tower out
    settings = fleet.config.weights.model_copy(update={"verify": known})
    config = fleet.config.model_copy(update={"weights": settings})

    async def play(client: GenerationClient) -> None:
        session = client.generate(group="g")
        answer = await session(context, images=[image])
        assert difference(fleet, context, [image], answer) < CLOSE
        publishing = publisher.make(config, fleet.addresses, weights, tmp_path)
        with closing(publishing.fleet), closing(publishing.fleet._router._http):
            await asyncio.to_thread(publishing.publish, 1)
        client.inflight.release(1)
        answer = await session(context, images=[image])
        assert difference(fleet, context, [image], answer, folder) < CLOSE
        assert difference(fleet, context, [image], answer) > 1e-3

    played(fleet, play)
