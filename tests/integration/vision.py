"""Groups with images, and what transformers computes for them."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from asyncrl.extensions.vision.tiny import TOKENS
from asyncrl.images import image_name
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan

ID = {token: number for number, token in enumerate(TOKENS)}
HOLDER = ID["<|image_pad|>"]
IMAGE = [ID["<|vision_start|>"], HOLDER, ID["<|vision_end|>"]]
FORBIDDEN = [ID[f"<|{name}|>"] for name in ("vision_start", "vision_end", "image_pad", "video_pad")]


def picture(seed: int, width: int = 56, height: int = 56) -> bytes:
    """Return a PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


PICTURES = [picture(0), picture(1), picture(2, 84, 56), picture(3, 56, 112)]
NAMES = [image_name(png) for png in PICTURES]


def words(text: str) -> list[int]:
    """Return the ids of a text."""
    return [ID[letter] for letter in text]


def vision_groups() -> list[Group]:
    """Return two groups whose prompts differ in the image only, one with two images and a third in a later turn or in a
    new context, and one without images. Rewards differ within each."""
    draw = random.Random(3)

    def completion(length: int) -> Completion:
        ids = [draw.randrange(40) for _ in range(length)]
        return Completion(ids, [-draw.random() * 4 for _ in ids], [VersionSpan(0, 0, length)], "stop")

    def plain(count: int) -> list[Trajectory]:
        return [Trajectory([Turn([], completion(3 + k))], float(k)) for k in range(count)]

    later = [
        Trajectory([Turn([], completion(4)), Turn([*words("a"), *IMAGE], completion(3), images=[NAMES[3]])], 1.0),
        Trajectory(
            [
                Turn([], completion(2)),
                Turn([*IMAGE, *words("b")], completion(5), begins=True, images=[NAMES[1]]),
                Turn([*words("c"), *IMAGE, *words("d")], completion(2), images=[NAMES[2]]),
            ],
            0.5,
        ),
        *plain(1),
    ]
    images = dict(zip(NAMES, PICTURES, strict=True))
    several = [*words("x"), *IMAGE, *words("y"), *IMAGE, *words("z=")]

    def group(slot: int, prompt: list[int], names: list[str], trajectories: list[Trajectory]) -> Group:
        used = [*names, *(name for one in trajectories for turn in one.turns for name in turn.images)]
        held = {name: images[name] for name in used}
        return Group(f"g{slot}", slot, prompt, trajectories, "t", prompt_images=names, images=held)

    return [
        group(0, [*IMAGE, *words("what=")], NAMES[:1], plain(3)),
        group(1, [*IMAGE, *words("what=")], NAMES[1:2], plain(3)),
        group(2, several, [NAMES[2], NAMES[0]], later),
        group(3, words("no image="), [], plain(2)),
    ]


def weights(groups: list[Group]) -> Tensor:
    """Return the weight of each of the policy's tokens in the sum whose gradients are compared."""
    return torch.randn(sum(group.num_tokens for group in groups), generator=torch.Generator().manual_seed(1))


def sequences(group: Group) -> Iterator[tuple[list[int], list[bool], list[str]]]:
    """Yield the ids of each sample with one placeholder for an image, which ids the policy wrote, and the images."""
    for turns in (turns for one in group.trajectories for turns in one.samples()):
        ids, mask, names = list(group.prompt_ids), [False] * len(group.prompt_ids), list(group.prompt_images)
        for _, turn in turns:
            if turn.begins:
                ids, mask, names = [], [], []
            ids += turn.observation + turn.completion.token_ids
            mask += [False] * len(turn.observation) + [True] * len(turn.completion.token_ids)
            names += turn.images
        yield ids, mask, names


def transformers_logprobs(model: torch.nn.Module, folder: Path, groups: list[Group]) -> Tensor:
    """Return transformers' log-probabilities of the policy's tokens, in the order of the trainer's table, under a
    distribution without the forbidden tokens."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor, found = Qwen2VLImageProcessorPil.from_pretrained(folder), []
    for group in groups:
        for ids, mask, names in sequences(group):
            images = [Image.open(io.BytesIO(group.images[name])) for name in names]
            read = processor(images=images, return_tensors="pt") if images else {}
            counts = iter((read["image_grid_thw"].prod(-1) // 4).tolist() if images else [])
            full = [(one, own) for one, own in zip(ids, mask, strict=True) for _ in range(_count(one, own, counts))]
            every, own = torch.tensor([one for one, _ in full]), torch.tensor([own for _, own in full])
            types = ((every == HOLDER) & ~own).int()
            logits = model(every[None], mm_token_type_ids=types[None], **read).logits[0]
            logprobs = logits.index_fill(1, torch.tensor(FORBIDDEN), -1e30).log_softmax(-1)
            rows = own.nonzero()[:, 0]
            found.append(logprobs[rows - 1].gather(1, every[rows, None])[:, 0])
    return torch.cat(found)


def _count(token: int, own: bool, counts: Iterator[int]) -> int:
    return next(counts) if token == HOLDER and not own else 1


ADAPTERS = ("policy", "second")
