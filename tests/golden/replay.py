"""One rank of the oracle: python -m tests.golden.replay FOLDER, with the environment of torchrun.

It trains the same two batches with every advantage, loss and correction, and with every layout of its number of
ranks, and writes statistics (with loss and gradient norm) and hashes of the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.config import Config, load
from asyncrl.extensions.recording import events
from asyncrl.schema import Batch, Completion, Group, Trajectory, Turn, VersionSpan
from tests.fakes import compose_values, in_parts
from tests.integration.losses import ALGORITHMS

SIZES = {"vocab": 33, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 24}
VERSION = 4
OTHERS: dict[str, list[str]] = {
    "kl": ["algo.kl.coefficient=0.1", "algo.kl.estimator=k2"],
    "kl-reward": ["algo.kl.coefficient=0.1", "algo.kl.place=reward"],
    "distillation": ["+distill.coefficient=0.5", "algo.advantage=none", "teacher=sglang", "teacher.model=/t"],
    "shaping": ["algo.shaping.overlong_buffer=2", "algo.shaping.normalize=true", "algo.shaping.mask_truncated=true"],
    "trust": ["algo.trust_region=1e-4", "algo.epochs=3", "algo.mini_batches=2"],
    "lora": ["trainer.lora.rank=4"],
    "recompute": ["trainer.recompute.granularity=full"],
}
LAYOUTS: dict[int, dict[str, list[str]]] = {
    1: {
        "unshared": ["trainer.share_prompts=false"],
        "micro-batches": ["trainer.micro_batch_tokens=48"],
        "chunks": ["trainer.logit_rows=3"],
        "parts": ["trainer.batch_parts=3", "rollout.max_staleness=2"],
    },
    2: {
        "tp2-sp": ["trainer.tensor_parallel=2", "trainer.sequence_parallel=true"],
        "pp2": ["trainer.pipeline_parallel=2", "trainer.micro_batch_tokens=48"],
        "dp2": ["trainer.data_parallel=2"],
        "cp2": ["trainer.context_parallel=2"],
    },
}
"""Settings by number of ranks."""
ACROSS = {"default": [], "gspo": ["algo.loss=gspo", "algo.aggregation=sequence", "algo.entropy_bonus=0.1"]}
"""What is trained in every layout."""


def groups() -> list[Group]:
    """Return unequal groups, with tool output between turns, rewards of turns, forks, states, and a teacher."""
    draw = random.Random(5)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(SIZES["vocab"]) for _ in range(draw.randint(low, high))]

    def turn(observation: list[int], **more: Any) -> Turn:
        ids = tokens(1, 6)
        cut, newest = draw.randint(0, len(ids)), draw.randint(2, VERSION)
        spans = [VersionSpan(newest - 1, 0, cut), VersionSpan(newest, cut, len(ids))]
        logprobs = [-3.5 + 0.4 * draw.gauss(0, 1) for _ in ids]
        teacher = [-3.4 + 0.4 * draw.gauss(0, 1) for _ in ids]
        answer = Completion(ids, logprobs, spans, draw.choice(["stop", "length"]))
        return Turn(observation, answer, reward=draw.choice([0.0, 0.25]), teacher=teacher, state="s", **more)

    made = []
    for slot, size in enumerate((3, 2, 4, 4)):
        prompt, members = tokens(5, 9), []
        for member in range(size):
            turns = [turn([])]
            if member % 2:
                turns.append(turn(tokens(2, 3)))
            if member == 2:
                turns.append(turn([*prompt, *turns[0].completion.token_ids], begins=True, fork=0))
                turns.append(turn([*prompt, *turns[0].completion.token_ids, *tokens(1, 1)], begins=True, fork=0))
            members.append(Trajectory(turns, 0.5 if slot == 1 else draw.random()))
        made.append(Group(f"g{slot:08d}", slot, prompt, members, "drawn"))
    return made


def cases(world: int) -> Iterator[tuple[str, list[str]]]:
    """Yield what this number of ranks trains, by name, with its settings."""
    if world == 1:
        for name in ADVANTAGES:
            if name != "none":
                yield f"advantage-{name}", [f"algo.advantage={name}"]
        for name, changes in ALGORITHMS.items():
            yield name, [f"algo.{field}={_text(value)}" for field, value in changes.items()]
        yield from OTHERS.items()
    for layout, settings in LAYOUTS[world].items():
        for name, more in ACROSS.items():
            yield f"{layout}-{name}", [*settings, *more]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return "null" if value is None else str(value)


def configured(settings: list[str]) -> Config:
    """Return the configuration of a case."""
    small = ["experiment=tiny", "rollout.temperature=0.8", "rollout.max_new_tokens=6", "algo.entropy_bonus=0"]
    if any(setting.startswith("teacher") for setting in settings):
        small[1] = "rollout.temperature=1.0"
    return load(compose_values(*small, "trainer.optimizer.lr=1e-2", *settings))


def prepare(folder: Path) -> None:
    """Write the model."""
    from asyncrl.models.tiny import write_random_model

    write_random_model(folder / "model", "qwen3", **SIZES, tied=True, seed=4, dtype="float32", spread=0.15)


def main(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from asyncrl.trainer.parallel import initialize, parallel_state, split
    from asyncrl.trainer.policy import Policy

    recorded = [events.unpacked(events.packed(group)) for group in groups()]
    found: dict[str, Any] = {}
    world, parallel = int(os.environ["WORLD_SIZE"]), None
    for name, settings in cases(world):
        config = configured(settings)
        if parallel is None:
            parallel = initialize(config.trainer, gpu=False, seed=0, timeout=120.0)
        else:
            parallel_state.destroy_model_parallel()
            parallel = split(config.trainer, torch.device("cpu"), 0)
        policy = Policy(config, folder / "model", parallel)
        for step in range(2):
            batch = Batch(VERSION + step, recorded[step:], {})
            figures = [policy.update(part) for part in in_parts(batch, config.trainer.batch_parts)][-1]
            found |= {f"{name}/{step}/{key}": float(value).hex() for key, value in figures.items()}
        digest = hashlib.sha256()
        for key, tensor in policy.weights.hf_tensors():
            digest.update(key.encode() + tensor.float().contiguous().numpy().tobytes())
        found[f"{name}/weights-{parallel.rank}"] = digest.hexdigest()
    rank = dist.get_rank()
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    from asyncrl.platforms import here

    here().prepare_trainer()
    main(Path(sys.argv[1]))
