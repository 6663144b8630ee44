"""Images of requests: only data URLs of images that our decoder made reach an engine, one for each placeholder."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.engine.client import GenerationClient
from asyncrl.extensions.vision.decoder import DecodingProcesses
from asyncrl.extensions.vision.fitting import ImageSizes
from asyncrl.extensions.vision.reader import ImageTokens, Vision
from asyncrl.extensions.vision.sizes import ImageShape
from asyncrl.images import ImageRefused, data_url, image_name, images_in, without_images
from asyncrl.schema import Exchange
from tests.engine.asking import asked
from tests.engine.resuming import resumed
from tests.fakes import FakeEngine, echo

IMAGE = [43, PAD := 45, 44]
PROMPT = [12, *IMAGE, 11]


@pytest.fixture
def vision() -> Iterator[Vision]:
    tokens = ImageTokens(*IMAGE, [PAD, 46], ImageShape(14, 2), most=2)
    decoder = DecodingProcesses(ImageSizes(28, 784, 16 * 784), 1 << 20)
    yield Vision(tokens, decoder, 16)
    decoder.close()


def png(colour: int = 0, size: tuple[int, int] = (56, 56)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def shown(data: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": data}, {"type": "text", "text": "1"}]}]


def test_requests_hold_a_placeholder_and_data_url_per_image(vision: Vision) -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        session = client.generate()
        images = await session.images(shown(png(1)))
        await session(PROMPT, images=images)
        await session([1, 2, 3])

    asked(engine, play, images=vision)
    with_image, without = engine.requests
    assert with_image["input_ids"] == PROMPT
    (url,) = with_image["image_data"]
    head, _, content = url.partition(",")
    assert head == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(content))).getpixel((5, 5)) == (1, 0, 0)
    assert "image_data" not in without
    assert with_image["sampling_params"]["logit_bias"] == {"45": -1e4, "46": -1e4}


ATTACKS = ("http://127.0.0.1:9/a.png", "https://example.org/a.png", "file:///etc/hostname", "/etc/hostname", "a.png")
FORMS = (
    lambda text: {"type": "image", "image": text},
    lambda text: {"type": "image_url", "image_url": {"url": text}},
    lambda text: {"type": "image_url", "image_url": text},
    lambda text: {"type": "image", "image": {"url": text}},
    lambda text: {"type": "image", "url": text, "path": text},
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_address_and_no_path_of_a_message_is_opened_or_sent(vision: Vision, attack: str, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        for text in (attack, str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri()):
            for form in FORMS:
                messages = [{"role": "user", "content": [form(text)]}]
                with pytest.raises(ImageRefused, match=r"not (accepted as )?an image"):
                    await client.generate().images(messages)
        for image in (attack, attack.encode()):
            with pytest.raises((ValueError, TypeError)):
                await client.generate()(PROMPT, images=[image])  # type: ignore[list-item]

    asked(engine, play, images=vision)
    assert engine.requests == []


def test_counts_are_checked_before_an_engine_sees_a_request(vision: Vision) -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        for ids, images, why in (
            ([43, PAD, PAD, PAD, PAD, 44], [png()], "4 placeholders"),
            ([12, PAD, 11], [png()], "stands between the tokens 43 and 44"),
            ([PAD, 44], [png()], "stands between"),
            (PROMPT, [], "1 placeholders"),
            ([12, 11], [png()], "0 placeholders"),
            (IMAGE * 3, [png()] * 3, r"3 images, more than vision.max_images=2"),
            (PROMPT, [png(size=(30, 28))], "not a multiple of 28"),
        ):
            with pytest.raises(ValueError, match=why):
                await client.generate()(ids, images=images)

    asked(engine, play, images=vision)
    assert engine.requests == []


def test_a_text_model_gets_no_images() -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        with pytest.raises(ImageRefused, match="reads no images"):
            await client.generate().images(shown(png()))
        with pytest.raises(ValueError, match="reads none"):
            await client.generate()([1, 2], images=[png()])
        assert await client.generate().images([{"role": "user", "content": "text"}]) == []

    asked(engine, play)
    assert engine.requests == []


def test_siblings_share_a_request_only_if_their_images_are_alike(vision: Vision) -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        images = [[png(1)], [png(1)], [png(2)]]
        await asyncio.gather(*(client.generate(group="g")(PROMPT, images=one) for one in images))

    asked(engine, play, images=vision)
    assert [request["sampling_params"]["n"] for request in engine.requests] == [2, 1]


def test_the_context_counts_every_token_of_an_image(vision: Vision) -> None:
    """28 tokens leave 8 for an answer beside one of 16 tokens; SGLang reserves some of them."""
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        await client.generate()(PROMPT, images=[png(size=(112, 112))])
        room = await client.generate()(PROMPT, images=[png(size=(56, 56))])
        full = await client.generate()(IMAGE * 2, images=[png(size=(112, 112))] * 2)
        assert room.token_ids
        assert (full.token_ids, full.finish_reason) == ([], "length")

    asked(engine, play, images=vision, context=28)
    assert [request["sampling_params"]["max_new_tokens"] for request in engine.requests] == [6, 8]


def test_a_resumed_request_gets_its_answer_only_with_its_image(vision: Vision) -> None:
    engine = FakeEngine(echo())

    async def play(client: GenerationClient) -> None:
        first = client.generate(group="g")
        answer = await first(PROMPT, images=[png(1)])
        said = first.said()
        assert said == [Exchange(PROMPT, answer, images=[image_name(png(1))])]
        again = resumed(client, "g", "g 0", 0, 3, said)
        await again(PROMPT, images=[png(2)])
        assert engine.requests[-1]["image_data"] == [data_url(png(2))]
        assert await again(PROMPT, images=[png(1)]) == answer

    asked(engine, play, images=vision)
    assert len(engine.requests) == 2


def test_templates_see_that_there_is_an_image_and_nothing_of_it() -> None:
    text = {"type": "text", "text": "what?"}
    messages = [
        {"role": "system", "content": "hi"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}, text]},
        {"role": "user", "content": [{"type": "image", "image": b"png"}]},
    ]
    assert images_in(messages) == ["data:image/png;base64,AA", b"png"]
    plain = without_images(messages)
    assert [one["content"] for one in plain] == ["hi", [{"type": "image"}, text], [{"type": "image"}]]


@pytest.mark.parametrize("kind", ["video", "video_url", "audio_url", "input_audio", "file"])
def test_video_and_audio_are_refused_in_words(kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind, kind: "data:,"}]}]
    for function in (images_in, without_images):
        with pytest.raises(ImageRefused, match=f"type '{kind}' is not supported: pass text and images only"):
            function(messages)
