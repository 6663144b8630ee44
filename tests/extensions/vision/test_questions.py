"""Questions and episodes with images: exact from the task to the group, each image once."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from asyncrl.agents.chat import Chat
from asyncrl.agents.single_turn import SingleTurn
from asyncrl.agents.template import ChatTemplate
from asyncrl.config import Config, load
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.vision.reader import Vision, vision_of
from asyncrl.extensions.vision.sizes import png_size
from asyncrl.images import image_name
from asyncrl.models.architectures import flat
from asyncrl.models.catalog import resolve
from asyncrl.models.families import known_families
from asyncrl.rollout.episode import Episode, EpisodeTimeouts
from asyncrl.rollout.parts import image_reader, load_tokenizer
from asyncrl.rollout.player import _images
from asyncrl.rollout.prompts import Prompts
from asyncrl.schema import Batch as TrainedBatch
from asyncrl.schema import Generate, Group, Prompt, Trajectory, Turn, decode_batch, encode
from asyncrl.tasks.build import build_all
from tests.fakes import FakeEngine, changed, compose_values, echo

LIMITS = EpisodeTimeouts(agent=60.0, reward=60.0, episode=None)


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve("builtin:tiny_vision")


def config_of(**changes: Any) -> Config:
    values = compose_values("experiment=tiny", "model=tiny_vision", "task=own", f"task.kind={__name__}:Coloured")
    return load(changed(values, {"task.name": "squares", "eval.questions": 8, **changes}))


def hf_of(model: Path) -> dict[str, Any]:
    return flat(json.loads((model / "config.json").read_text()))


@pytest.fixture
def vision(model: Path) -> Iterator[Vision]:
    found = vision_of(config_of(), model, hf_of(model))
    yield found
    found.decoder.close()


def prompts_of(model: Path, vision: Vision | None, length: int = 512, **changes: Any) -> Prompts:
    config = config_of(**changes)
    return Prompts(config, build_all(config), ChatTemplate(load_tokenizer(model, None)), length, images=vision)


def png(colour: int, size: tuple[int, int] = (56, 56)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (colour % 256, colour // 256 % 256, colour // 65536 % 256)).save(file, "PNG")
    return file.getvalue()


class Coloured:
    """Asks the same about an image of another colour each time."""

    def question(self, index: int) -> dict[str, Any]:
        image = {"type": "image", "image": png(index)}
        return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": "c"}]}]}

    def score(self, answer: str, question: dict[str, Any]) -> float:
        return float(answer == "r")


def test_questions_with_one_text_are_told_apart_by_their_images(model: Path, vision: Vision) -> None:
    prompts = prompts_of(model, vision)
    drawn = list(itertools.islice(prompts.training["squares"], 20))
    held_out = prompts.held_out["squares"]
    assert len({tuple(one.token_ids) for one in [*drawn, *held_out]}) == 1
    assert len({one.images[0] for one in held_out}) == 8
    assert not {one.images[0] for one in held_out} & {one.images[0] for one in drawn}
    assert all(png_size(one.images[0]) == (56, 56) for one in drawn)
    for prompt in drawn[:3]:  # as after a resume
        assert prompts.again(prompt.uid, prompt.task, prompt.index) == prompt


def test_images_are_decoded_ahead_and_prompts_stay_what_they_are(
    model: Path, vision: Vision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor counts what was drawn, not what was decoded ahead."""
    ahead, then, alone = (prompts_of(model, vision) for _ in range(3))
    drawn = list(itertools.islice(ahead.training["squares"], 40))
    assert 0 < len(ahead._begun) <= Vision.ahead
    then.go_on(ahead.cursor())
    following = list(itertools.islice(then.training["squares"], 3))
    monkeypatch.setattr(Vision, "ahead", 1)
    assert [*drawn, *following] == list(itertools.islice(alone.training["squares"], 43))


def test_lengths_of_prompts_count_every_token_of_their_images(model: Path, vision: Vision) -> None:
    """A prompt of 5 ids, one of which stands for an image of 4 tokens, has 8 tokens; answers take 3."""
    assert next(prompts_of(model, vision, length=11).training["squares"])
    with pytest.raises(ConfigError, match=r"has 8 tokens, but rollout.max_new_tokens leaves only 7"):
        next(prompts_of(model, vision, length=10, **{"rollout.overlong_prompts": "refuse"}).training["squares"])


def test_a_text_model_is_asked_no_question_with_an_image(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"reads no images: choose one that does \(model.path\)"):
        prompts_of(model, None, **{"rollout.overlong_prompts": "refuse"})


def test_questions_with_a_broken_image_are_left_out_or_refused(model: Path, vision: Vision, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(number)[: 40 if number == 2 else None])
    rows = [{"prompt": "what", "answer": "1", "image": f"{number}.png"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"task.kind": "file", "task.train_file": str(tmp_path / "rows.jsonl"), "task.image_key": "image"}
    changes |= {"task.reward": "exact", "eval.questions": 0}
    prompts = prompts_of(model, vision, **changes)
    drawn = list(itertools.islice(prompts.training["squares"], 6))
    assert {one.index for one in drawn} == {0, 1, 3}
    assert prompts.left_out["squares"] >= 1
    with pytest.raises(ConfigError, match=r"Question 2 of squares cannot be read: .*image"):
        list(itertools.islice(prompts_of(model, vision, **changes, **{"rollout.overlong_prompts": "refuse"})
                              .training["squares"], 4))  # fmt: skip


def test_limits_are_those_of_the_model_and_of_the_run(model: Path) -> None:
    def size(**limits: Any) -> tuple[int, int]:
        found = vision_of(config_of(**{f"vision.{k}": v for k, v in limits.items()}), model, hf_of(model))
        try:
            return png_size(found.decoder.begin(png(1, (400, 400))).result())
        finally:
            found.decoder.close()

    assert size() == (112, 112)
    assert size(max_pixels=4000) == (56, 56)
    with pytest.raises(ConfigError, match=r"vision.max_pixels: got 900.*raise it"):
        size(max_pixels=900)


class Looking:
    """Looks at the prompt's image, then at others that its messages bring, and once from the start again."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        chat = Chat.of(prompt, generate)
        await chat.answer()
        chat.say([{"role": "user", "content": [{"type": "image", "image": png(7)}, {"type": "text", "text": "1"}]}])
        await chat.answer()
        branch = chat.branch(1)
        await branch.answer()
        chat.restart([{"role": "user", "content": [{"type": "image", "image": png(7)}]}])
        await chat.answer()
        return Trajectory([*chat.turns[:2], *branch.turns, chat.turns[2]], 1.0)


async def played(agent: Any, model: Path, vision: Vision, engine: FakeEngine) -> tuple[Prompt, Group]:
    prompt = next(prompts_of(model, vision).training["squares"])
    client = engine.client(images=vision)
    template, sessions = ChatTemplate(load_tokenizer(model, None)), [client.generate(group="g") for _ in range(2)]

    async def scored(one: Trajectory) -> Trajectory:
        return Trajectory(one.turns, 0.0)

    trajectories = [await Episode(one, LIMITS, template).play(agent, prompt, scored) for one in sessions]
    images = _images(prompt, trajectories, sessions)
    names = [image_name(one) for one in prompt.images]
    return prompt, Group("g", 0, prompt.token_ids, trajectories, prompt.task, None, names, images)


def test_groups_hold_every_image_once_and_turns_name_theirs(model: Path, vision: Vision) -> None:
    engine = FakeEngine(echo())
    prompt, group = asyncio.run(played(Looking(), model, vision, engine))
    first, seven = image_name(prompt.images[0]), image_name(vision.decoder.begin(png(7)).result())
    for one in group.trajectories:
        assert [turn.images for turn in one.turns] == [[], [seven], [first, seven], [seven]]
    assert group.images.keys() == {first, seven}
    assert [len(request.get("image_data", ())) for request in engine.requests] == [1, 2, 2, 1] * 2
    assert decode_batch(encode(TrainedBatch(0, [group], {}))).groups == [group]


class Requesting(Looking):
    """The same, without saying so: its requests become the trajectory."""

    async def run(self, prompt: Prompt, generate: Generate) -> float:  # type: ignore[override]
        await super().run(prompt, generate)
        return 1.0


def test_linked_turns_continue_contexts_with_equal_images(model: Path, vision: Vision) -> None:
    engine = FakeEngine(echo())
    _, group = asyncio.run(played(Requesting(), model, vision, engine))
    names = [[(turn.begins, len(turn.images)) for turn in one.turns] for one in group.trajectories]
    assert names == [[(False, 0), (False, 1), (True, 2), (True, 1)]] * 2


class Swapping:
    """Says that it saw another image than the engine did."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        other = (await generate.images([{"role": "user", "content": [{"type": "image", "image": png(9)}]}]))[0]
        return Trajectory([Turn([], await generate(prompt.token_ids, images=[other]))], 1.0)


def test_trajectory_with_unread_images_is_refused(model: Path, vision: Vision) -> None:
    with pytest.raises(EpisodeFailed, match="follows other images than the engine read"):
        asyncio.run(played(Swapping(), model, vision, FakeEngine(echo())))


class Sending:
    """Sends what no decoder accepts."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        chat = Chat.of(prompt, generate)
        await chat.answer()
        chat.say([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}])
        await chat.answer()
        return chat.trajectory(1.0)


def test_refused_image_costs_its_group_and_no_request(model: Path, vision: Vision) -> None:
    engine = FakeEngine(echo())
    with pytest.raises(EpisodeFailed, match=r"agent_error: ImageRefused: .*nothing opens a path or an address"):
        asyncio.run(played(Sending(), model, vision, engine))
    assert len(engine.requests) == 1
    asyncio.run(played(SingleTurn(), model, vision, engine))


def test_without_the_extension_a_model_that_sees_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.models.families.offered", lambda table: {})
    known_families.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"Qwen2_5_VL.*Supported architectures: .*LlamaForCausalLM"):
            image_reader(config_of(), model, json.loads((model / "config.json").read_text()))
    finally:
        known_families.cache_clear()
