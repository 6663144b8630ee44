"""Images in the OpenAI API: data URLs alone, exact in every later turn; all else is answered with 400 in words."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.agents.template import ChatTemplate
from asyncrl.extensions.proxy.agents import _question
from asyncrl.extensions.proxy.messages import ApiError
from asyncrl.extensions.proxy.session import ProxySession, ProxyStats
from asyncrl.images import ImageReader, image_name
from asyncrl.models.architectures import flat
from asyncrl.models.catalog import resolve
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.rollout.parts import load_tokenizer
from asyncrl.schema import Completion, Prompt, VersionSpan
from tests.fakes import FakeEngine, pieces, stream, tiny_config

reader = pytest.importorskip("asyncrl.extensions.vision.reader")
EOS = 42


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("builtin:tiny_vision")


@pytest.fixture
def vision(model: Path) -> Iterator[Any]:
    hf = flat(json.loads((model / "config.json").read_text()))
    found = reader.vision_of(tiny_config(), model, hf)
    yield found
    found.decoder.close()


def png(colour: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (56, 56), (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@asynccontextmanager
async def session(model: Path, vision: Any, engine: FakeEngine) -> AsyncIterator[ProxySession]:
    client = engine.client(images=vision or ImageReader(), stop_token_ids=[EOS])
    template = ChatTemplate(load_tokenizer(model, None))
    episode = Episode(client.generate(), EpisodeTimeouts(60.0, 60.0, None), template)
    async with ProxySession(episode, tool_format="hermes", figures=ProxyStats()) as found:
        yield found
    await client.close()


def engine_of() -> FakeEngine:
    """An engine that answers 1, 2, 3, ..., each with the end of an answer."""
    numbers = itertools.count(1)

    def answer(request: dict[str, Any]) -> bytes:
        ids = [next(numbers), EOS]
        return stream(pieces(Completion(ids, [-0.5, -0.5], [VersionSpan(0, 0, 2)], "stop")))

    return FakeEngine(answer)


def test_a_chat_with_images_continues_with_exactly_those(model: Path, vision: Any) -> None:
    engine = engine_of()

    async def main() -> None:
        async with session(model, vision, engine) as behind:
            first = [user(part(url(png(1))), {"type": "text", "text": "a"})]
            answer = (await behind.chat({"messages": first})).choices[0].message
            second = [*first, answer, user({"type": "text", "text": "b"}, part(url(png(2))))]
            answer = (await behind.chat({"messages": second})).choices[0].message
            await behind.chat({"messages": [*second, answer, {"role": "user", "content": "c"}]})
            other = [user(part(url(png(3))), {"type": "text", "text": "a"})]  # the same ids, another image
            await behind.chat({"messages": other})
            images = [vision.decoder.begin(png(colour)).result() for colour in (1, 2, 3)]
            prompt = engine.requests[0]["input_ids"]
            turns = behind.trajectory(prompt, 1.0, images[:1]).turns
            names = [image_name(one) for one in images]
            assert [(turn.begins, turn.images) for turn in turns] == [
                (False, []),
                (False, [names[1]]),
                (False, []),
                (True, [names[2]]),
            ]

    asyncio.run(main())
    assert [len(request["image_data"]) for request in engine.requests] == [1, 2, 2, 1]
    assert engine.requests[2]["image_data"] == engine.requests[1]["image_data"]
    assert engine.requests[3]["input_ids"] == engine.requests[0]["input_ids"]


REFUSED = {
    "http": (part("http://127.0.0.1:1/a.png"), "nothing opens a path or an address"),
    "https": (part("https://example.org/a.png"), "nothing opens a path or an address"),
    "file": (part("file:///etc/passwd"), "nothing opens a path or an address"),
    "path": (part("/etc/passwd"), "nothing opens a path or an address"),
    "svg": (part("data:image/svg+xml;base64,PHN2Zy8+"), "data URLs"),
    "no image": (part(url(b"text")), "no PNG, JPEG or WebP image"),
    "nothing": ({"type": "image_url"}, "is not an image"),
    "video": ({"type": "video_url", "video_url": {"url": "data:,"}}, "'video_url' is not supported"),
    "audio": ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "'input_audio' is not supported"),
    "file part": ({"type": "file", "file": {"file_id": "x"}}, "'file' is not supported"),
    "a placeholder as text": ({"type": "text", "text": "<|image_pad|>"}, "1 placeholders .* for 0 images"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_non_image_is_answered_with_400_before_engines(model: Path, vision: Any, name: str) -> None:
    engine = engine_of()
    given, why = REFUSED[name]

    async def main() -> None:
        async with session(model, vision, engine) as behind:
            with pytest.raises(ApiError, match=why) as refused:
                await behind.chat({"messages": [user(given, {"type": "text", "text": "a"})]})
            assert refused.value.status == 400
            await behind.chat({"messages": [user(part(url(png(1))))]})

    asyncio.run(main())
    assert len(engine.requests) == 1


def test_a_text_model_answers_images_with_400(model: Path) -> None:
    async def main() -> None:
        async with session(model, None, engine_of()) as behind:
            with pytest.raises(ApiError, match="reads no images"):
                await behind.chat({"messages": [user(part(url(png(1))))]})

    asyncio.run(main())


def test_programs_get_the_questions_images_as_data_urls(model: Path, vision: Any) -> None:
    """Sent back to the proxy, they are the images of the prompt, and the episode continues it."""
    ready = vision.decoder.begin(png(1)).result()
    messages = [user({"type": "image", "image": png(1)}, {"type": "text", "text": "a"})]
    ids = ChatTemplate(load_tokenizer(model, None)).begin(messages)
    prompt = Prompt("p0", ids, {"messages": messages, "answer": "1"}, "t", images=[ready])
    question = json.loads(json.dumps(_question(prompt)))
    engine = engine_of()

    async def main() -> None:
        async with session(model, vision, engine) as behind:
            await behind.chat({"messages": question["messages"]})
            (turn,) = behind.trajectory(prompt.token_ids, 1.0, prompt.images).turns
            assert (turn.begins, turn.observation, turn.images) == (False, [], [])

    asyncio.run(main())
