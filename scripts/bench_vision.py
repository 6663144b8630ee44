"""Benchmark of the trainer's step with images, against images that are not shared and against transformers.

    python scripts/bench_vision.py [--quick]

The model is a random Qwen2.5-VL with a frozen vision tower, in one thread. Every step is complete: images from PNG
files, forward, backward, gradient norm, clipping, AdamW; no embedding is left from the step before. Each case runs in
its own process. Times are CPU-seconds, and ratios compare measurements of this run. --quick: a smaller model. The last
line is JSON:

    shared_image_gain    one image of 256 tokens and 16 answers of 8 tokens: time of a step in which each answer runs
                         with its own copy of the image's tokens / in which all share them; encoded once in both
    over_transformers    16 images of 256 tokens, each with one answer of 8: time of transformers' step / of ours
    image_path_share     in our step of that case, the share of decoding, normalising and encoding the images
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from asyncrl.images import image_name  # noqa: E402
from asyncrl.platforms import without_gpu  # noqa: E402
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan  # noqa: E402
from scripts import machine  # noqa: E402
from scripts.bench_train import BUDGET, Model, cpu_seconds  # noqa: E402

SIDE, ANSWERS, LENGTH = 448, 16, 8
"""Pixels of an image's side (256 tokens), answers, and their tokens."""
CASES = ("shared", "apart", "ours", "transformers")
LARGE: Any = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
QUICK: Any = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


def write_model(folder: Path, quick: bool) -> None:
    """Write the model."""
    from asyncrl.extensions.vision import tiny as tiny_vision

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    tiny_vision.write(folder, rope_parameters=rope, max_position_embeddings=1024, **(QUICK if quick else LARGE))


def groups_of(images: int) -> list[Group]:
    """Return ANSWERS answers of random tokens to this many images, one group for each."""
    import numpy as np
    from PIL import Image

    from asyncrl.extensions.vision.tiny import TOKENS

    rng, found = np.random.default_rng(0), []
    start, pad, end = (TOKENS.index(f"<|{mark}|>") for mark in ("vision_start", "image_pad", "vision_end"))
    for number in range(images):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(file, "PNG")
        png = file.getvalue()
        played = []
        for _ in range(ANSWERS // images):
            ids = rng.integers(0, 36, LENGTH).tolist()
            answer = Completion(ids, [-1.0] * LENGTH, [VersionSpan(0, 0, LENGTH)], "length")
            played.append(Trajectory([Turn([], answer)], 0.0))
        name = image_name(png)
        prompt = [start, pad, end, 12, 38]
        found.append(Group(f"g{number}", number, prompt, played, "t", prompt_images=[name], images={name: png}))
    return found


# --- one case, in a process of its own ----------------------------------------------------------------------


def case(folder: Path, name: str, repeats: int) -> dict[str, float]:
    """Return the minimum CPU-seconds of a step, and those that its images took."""
    groups = groups_of(1 if name in ("shared", "apart") else ANSWERS)
    step = transformers_step(folder, groups) if name == "transformers" else our_step(folder, groups, name)
    step()
    found = []
    for _ in range(repeats):
        IMAGE_SECONDS.clear()
        found.append((cpu_seconds(step), sum(IMAGE_SECONDS)))
    total, images = min(found)
    return {"step": total, "images": images}


IMAGE_SECONDS: list[float] = []
"""CPU-seconds of the image path in the present step."""


def our_step(folder: Path, groups: list[Group], name: str) -> Callable[[], None]:
    """Return a step of the trainer that starts from what it receives."""
    shared = f"trainer.share_prompts={str(name != 'apart').lower()}"
    model = Model(folder, "float32", shared, f"trainer.micro_batch_tokens={BUDGET}")
    import torch

    from asyncrl.algo.samples import build_samples
    from asyncrl.extensions.vision.encoder import ImageEncoder

    vision, weights = model.network.encoder, torch.full((ANSWERS * LENGTH,), 1 / ANSWERS / LENGTH)
    assert isinstance(vision, ImageEncoder)
    encode = vision._encoded

    def encoded(names: list[str]) -> Any:
        found: list[Any] = []
        IMAGE_SECONDS.append(cpu_seconds(lambda: found.extend(encode(names))))
        return found

    vision._encoded = encoded  # type: ignore[method-assign]

    def step() -> None:
        vision._embeddings.clear()
        samples = vision.begin(groups, build_samples(groups))
        model.step(model.network.packs(samples), weights)

    return step


def transformers_step(folder: Path, groups: list[Group]) -> Callable[[], None]:
    """Return the same step with transformers' model and torch's AdamW. Only rows of answers become logits."""
    import torch
    from PIL import Image
    from transformers import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.set_num_threads(1)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.model.visual.requires_grad_(False)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    answers = torch.tensor([group.trajectories[0].turns[0].completion.token_ids for group in groups])
    (start, pad, *rest), count = groups[0].prompt_ids, SIDE**2 // 28**2
    prompt = torch.tensor([[start, *[pad] * count, *rest]]).expand(len(groups), -1)
    ids = torch.cat([prompt, answers], 1)[:, :-1]

    def step() -> None:
        optimizer.zero_grad()
        images = [Image.open(io.BytesIO(next(iter(group.images.values())))) for group in groups]
        read = processor(images=images, return_tensors="pt", do_resize=False)
        hidden = model.model(input_ids=ids, mm_token_type_ids=(ids == pad).int(), use_cache=False, **read)[0]
        logits = model.lm_head(hidden[:, -LENGTH:])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.001)
        optimizer.step()

    return step


def main() -> None:
    """Measure, and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    parser.add_argument("--case", nargs=2, metavar=("FOLDER", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(Path(options.case[0]), options.case[1], 3 if options.quick else 5)))
        return
    this, found = machine.report(), {}
    with tempfile.TemporaryDirectory(prefix="bench-vision-") as folder:
        write_model(Path(folder) / "model", options.quick)
        for name in CASES:
            command = [sys.executable, __file__, "--case", f"{folder}/model", name]
            command += ["--quick"] if options.quick else []
            environment = {
                **os.environ,
                **without_gpu().environment,
            }  # as the launcher starts trainers; here transformers, too
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800, check=False
            )
            if done.returncode:
                sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
            found[name] = json.loads(done.stdout.splitlines()[-1])
    table = Table("case", "CPU-seconds of a step", "of these for images", box=None)
    for name, one in found.items():
        table.add_row(name, f"{one['step']:.3f}", f"{one['images']:.3f}" if name != "transformers" else "")
    Console(width=120).print(table)
    figures = {
        "shared_image_gain": found["apart"]["step"] / found["shared"]["step"],
        "over_transformers": found["transformers"]["step"] / found["ours"]["step"],
        "image_path_share": found["ours"]["images"] / found["ours"]["step"],
    }
    print(
        json.dumps(
            {name: round(value, 3) for name, value in figures.items()} | {"quick": options.quick, "machine": this}
        )
    )


if __name__ == "__main__":
    main()
