"""Memory and time of runs on H100s as computed by asyncrl/extensions/plan/sizing.py: the tables of results/sizes.md.

    python scripts/sizes.py                             writes the tables
    python scripts/sizes.py --check                     checks that they agree with the planner
    python scripts/sizes.py experiment=llama3_70b trainer.data_parallel=2 ...          one run, part by part
    python scripts/sizes.py experiment=qwen3_8b model.path=FOLDER ...                   of another model's config.json

Machines have 8 GPUs unless cluster.gpus is set.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from asyncrl import CONF
from asyncrl import config as configuration
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extensions.lora.choice import choose_lora
from asyncrl.extensions.plan import memory, shapes, sizing
from asyncrl.extensions.plan.settings import layout_of, served_adapters, told_of_memory, training_of
from asyncrl.extensions.plan.shapes import Shape, shape_of
from asyncrl.extensions.plan.sizing import Balance, FleetSpec, Hardware, Publish
from asyncrl.extensions.plan.tensors import Weight, tensors
from asyncrl.launch.checks.model import check_model
from asyncrl.launch.compose import find_further_confs
from asyncrl.launch.placement import imagined, place
from asyncrl.launch.precision import assumed

DOCS = Path(__file__).parent.parent / "results" / "sizes.md"
BEGIN, END = "<!-- sizes: written by scripts/sizes.py -->\n", "<!-- end of sizes -->\n"
HARDWARE = Hardware()
ROOM = 0.9 * HARDWARE.memory
"""Bytes of a GPU that may be planned. Libraries and fragmentation take the rest (extensions/plan/memory_check.py)."""
PIECE = 0.19e-3
"""CPU seconds of the rollout process per chunk of an answer (results/measurements.md)."""

QWEN3: dict[str, Any] = {"vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 40960}
QWEN3_MOE: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_8b": {
        **QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
    "llama3_70b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "max_position_embeddings": 131072,
    },
    "qwen3_30b_a3b": {
        **QWEN3_MOE,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3_235b_a22b": {
        **QWEN3_MOE,
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
}
"""Fields of the models' published config.json that determine memory and layout, by experiment."""
QWEN3_32B: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 25600,
}
ADAPTED = {
    "qwen3_8b_lora": MODELS["qwen3_8b"],
    "qwen3_32b_qlora": QWEN3_32B,
    "llama3_70b_lora": MODELS["llama3_70b"],
}
"""The same fields of experiments with adapters."""
SEEING: dict[str, dict[str, Any]] = {
    "qwen2_5_vl_7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
    },
    "qwen3_vl_8b": {
        **MODELS["qwen3_8b"],
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "max_position_embeddings": 262144,
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    },
}
"""The same fields of experiments with images."""
ONE_RANK = ("trainer.tensor_parallel=1", "trainer.sequence_parallel=false", "engine.tensor_parallel=1")
ADAPTED_ROWS: list[tuple[str, int, float, tuple[str, ...]]] = [
    ("qwen3_8b_lora", 1, 80e9, ()),
    ("qwen3_32b_qlora", 2, 80e9, ()),
    ("qwen3_32b_qlora", 1, 141e9, ONE_RANK),
    ("llama3_70b_lora", 8, 80e9, ()),
]
"""Experiment, number of GPUs, bytes of each, and further overrides."""
SET = ("trainer.data_parallel", "engine.count", "rollout.batch_groups", "engine.stream_interval")
"""Settings that change with size."""
ROWS: list[tuple[str, int, tuple[int, ...] | None]] = [
    ("qwen3_8b", 8, ()),
    ("qwen3_8b", 16, (4, 8, 128, 32)),
    ("qwen3_8b", 64, (16, 32, 256, 64)),
    ("qwen3_8b", 512, (128, 256, 2048, 512)),
    ("qwen3_8b", 1024, (256, 512, 4096, 1024)),
    ("llama3_70b", 8, None),
    ("llama3_70b", 16, None),
    ("llama3_70b", 64, ()),
    ("llama3_70b", 512, (8, 48, 1024, 128)),
    ("llama3_70b", 1024, (16, 96, 2048, 256)),
    ("qwen3_30b_a3b", 8, None),
    ("qwen3_30b_a3b", 32, (8, 8, 64, 64)),
    ("qwen3_30b_a3b", 64, ()),
    ("qwen3_30b_a3b", 512, (96, 160, 1024, 512)),
    ("qwen3_30b_a3b", 1024, (192, 320, 2048, 1024)),
    ("qwen3_235b_a22b", 8, None),
    ("qwen3_235b_a22b", 64, None),
    ("qwen3_235b_a22b", 512, ()),
    ("qwen3_235b_a22b", 1024, (8, 96, 1024, 128)),
]
"""Experiment, number of GPUs, and values of SET in addition to the experiment (empty: as shipped; None: it does not
fit)."""


@dataclass(frozen=True)
class Sized:
    """Computed size of one run."""

    config: Config
    shape: Shape
    weights: list[Weight]
    machines: int
    trainer: dict[str, int]
    engine: dict[str, int]
    publish: Publish
    balance: Balance

    @property
    def batch_tokens(self) -> float:
        """Return the tokens of a batch whose answers have half of the maximum length."""
        rollout = self.config.rollout
        return rollout.batch_groups * rollout.group_size * rollout.max_new_tokens / 2

    @property
    def step(self) -> float:
        """Return the seconds of a step if both sides are as fast as computed."""
        return self.batch_tokens / self.balance.rate

    @property
    def core(self) -> float:
        """Return the fraction of its core that the rollout process spends on the engines' chunks."""
        return self.balance.rate / self.config.engine.stream_interval * PIECE


def load(*overrides: str, values: Sequence[str] = ()) -> Config:
    """Load a configuration as the command does, for machines with 8 GPUs.

    `values` are overrides that select no file.
    """
    composed = OmegaConf.merge(_composed(*overrides), OmegaConf.from_dotlist(list(values)))
    settings: Any = OmegaConf.to_container(composed, resolve=True)
    return assumed(configuration.load(settings), HARDWARE.per_machine)


@cache
def _composed(*overrides: str) -> Any:
    words = [
        "cluster=slurm",
        f"cluster.gpus={HARDWARE.per_machine}",
        "model.path=MODEL",
        "task.train_file=FILE",
        *overrides,
    ]
    find_further_confs()
    with initialize_config_dir(str(CONF), version_base=None):
        return compose("train", words)


def size(config: Config, hf: dict[str, Any]) -> Sized:
    """Return the size of a run. Raises ConfigError if the configuration does not fit the model or the machines."""
    from asyncrl.extensions.slurm.submit import nodes_wanted  # here, since the rest works without it

    check_model(config, hf, HARDWARE.per_machine)
    config, _ = choose_lora(config, hf, HARDWARE.per_machine)
    each = config.cluster.gpus or HARDWARE.per_machine
    machines = config.cluster.nodes or nodes_wanted(config, each)
    place(config, imagined(config, machines, each))
    shape = shape_of(hf)
    weights = shapes.counted(tensors(hf), shape)
    layout, training = layout_of(config.trainer), training_of(config, gpu=True)
    section = config.engine
    received = 2 * (config.weights.bucket_mb << 20)  # the bucket, and its tensors
    part: Any = {
        "tensor": section.tensor_parallel,
        "dtype": section.dtype,
        "linear_bytes": told_of_memory(config).get("linear_bytes"),
    }
    part |= served_adapters(config)
    tokens = section.max_total_tokens or memory.cache_that_fits(weights, shape, ROOM - received, **part)
    if tokens < config.rollout.max_new_tokens:
        remedy = f"Its GPUs have room for the cache of {tokens} tokens, less than rollout.max_new_tokens: raise it."
        raise ConfigError("engine.tensor_parallel", section.tensor_parallel, remedy)
    engine = memory.engine_rank(weights, shape, **part, tokens=tokens)
    sent = _sent(config, weights, shape, one_machine=machines == 1)
    fleet = FleetSpec(section.count, section.tensor_parallel, section.max_running_requests, tokens)
    longest = config.rollout.max_new_tokens
    balance = sizing.balance(
        weights,
        shape,
        gpus=config.trainer.world_size,
        fleet=fleet,
        engine=sizing.engine_shape(engine, fleet, longest / 2, HARDWARE),
        batch_tokens=config.rollout.batch_groups * config.rollout.group_size * longest / 2,
        sent=sent,
        hardware=HARDWARE,
        adapters=training.adapters,
    )
    trainer = memory.trainer_rank(weights, shape, layout, training)
    engine["received bucket"] = received
    return Sized(config, shape, weights, machines, trainer, engine, sent, balance)


def _sent(config: Config, weights: list[Weight], shape: Shape, *, one_machine: bool) -> Publish:
    layout, training = layout_of(config.trainer), training_of(config, gpu=True)
    if training.adapters and training.versions:
        return sizing.publish_adapter(weights, training.adapters, dtype=config.engine.dtype, hardware=HARDWARE)
    return sizing.publish(
        weights,
        shape,
        layout,
        dtype=training.dtype,
        bucket=config.weights.bucket_mb << 20,
        streams=bool(training.bucket),
        one_machine=one_machine,
        hardware=HARDWARE,
    )


@cache
def row(name: str, values: tuple[int, ...]) -> Sized:
    """Return the size of a row of the tables."""
    return size(load(f"experiment={name}", values=settings(values)), MODELS[name])


def settings(values: tuple[int, ...]) -> list[str]:
    """Return the values of SET as overrides."""
    return [f"{setting}={value}" for setting, value in zip(SET, values, strict=False)]


def gb(number: float) -> str:
    """Return gigabytes with three digits."""
    return f"{number / 1e9:.3g}" if number < 1e12 else f"{number / 1e9:,.0f}"


# -- the tables --------------------------------------------------------------------------------------------


def least(name: str, gpus: int) -> float:
    """Return the minimum bytes of a trainer rank: 18 per parameter, shared by all GPUs except those that one engine
    needs for its weights."""
    count = shapes.parameters(Weight(name, size) for name, size in tensors(MODELS[name])).all
    return 18 * count / (gpus - -(-2 * count // int(ROOM)))


def table() -> Iterator[str]:
    """Yield the lines of the table of sizes."""
    yield "| model | GPUs | trainers: TP PP CP DP EP | engines | batch | trainer | engine | publish | pause | "
    yield "train, write | step | core |\n|" + "---|" * 12 + "\n"
    for name, gpus, values in ROWS:
        if values is None:
            yield f"| {name} | {gpus} | none: {least(name, gpus) / 1e9:,.0f} GB |" + " |" * 9 + "\n"
            continue
        one = row(name, values)
        t, e, r = one.config.trainer, one.config.engine, one.config.rollout
        degrees = (t.tensor_parallel, t.pipeline_parallel, t.context_parallel, t.data_parallel, t.expert_parallel)
        buckets = max(one.publish.buckets)
        cells = [
            name,
            str(gpus),
            f"{t.world_size}: {' '.join(map(str, degrees))}",
            f"{e.count} × TP {e.tensor_parallel}",
            f"{r.batch_groups} × {r.group_size}",
            gb(sum(one.trainer.values())),
            gb(sum(one.engine.values())),
            f"{gb(one.publish.nbytes)}: {len(one.publish.buckets)} × {buckets}",
            f"{one.publish.pause:.2g}",
            f"{one.balance.trainers / 1e3:,.0f}, {one.balance.engines / 1e3:,.0f}",
            f"{one.step:.0f}",
            f"{one.core:.2f}",
        ]
        yield "| " + " | ".join(cells) + " |\n"


def parts_table() -> Iterator[str]:
    """Yield the lines of the table of the shipped experiments' memory by part."""
    shipped = {name: row(name, ()) for name in MODELS}
    runs = list(shipped.values())
    names = [part for part in runs[0].trainer if any(one.trainer[part] for one in runs)]
    yield "| a trainer rank, GB | " + " | ".join(shipped) + " |\n|" + "---|" * (len(shipped) + 1) + "\n"
    for part in names:
        yield f"| {part} | " + " | ".join(gb(one.trainer[part]) for one in runs) + " |\n"
    yield "| **an engine rank** |" + " |" * len(shipped) + "\n"
    for part in ("weights", "KV cache", "received bucket"):
        yield f"| {part} | " + " | ".join(gb(one.engine[part]) for one in runs) + " |\n"
    yield "| **a checkpoint**, GB | " + " | ".join(gb(checkpoint(one)) for one in runs) + " |\n"
    yield "| of it in a machine's memory | " + " | ".join(gb(staged(one)) for one in runs) + " |\n"


def checkpoint(one: Sized) -> int:
    """Return the size of a checkpoint on disk in bytes."""
    return memory.checkpoint_bytes(one.weights, one.shape, training_of(one.config, gpu=True))


def staged(one: Sized) -> int:
    """Return the bytes of a machine's memory that hold a checkpoint until it is written."""
    trainer, each = one.config.trainer, one.config.cluster.gpus or HARDWARE.per_machine
    rank = memory.checkpoint_staging(one.weights, one.shape, layout_of(trainer), training_of(one.config, gpu=True))
    return rank * min(each, trainer.world_size)


@cache
def adapted_row(name: str, gpus: int, values: tuple[str, ...]) -> Sized:
    """Return the size of a row of the table of adapters."""
    return size(load(f"experiment={name}", values=[f"cluster.gpus={gpus}", *values]), ADAPTED[name])


def most_on_gpu(one: Sized) -> int:
    """Return the largest number of bytes on a GPU, which trainers and engines may use in turns."""
    if one.config.cluster.placement == "colocated":
        return max(sum(turn.values()) for turn in memory.turns(one.trainer, one.engine).values())
    return max(sum(one.trainer.values()), sum(one.engine.values()))


def adapted_table() -> Iterator[str]:
    """Yield the lines of the table of experiments with adapters."""
    yield "| experiment | GPUs | use | base | base, GB | adapters, GB | trainer, GB | engine, GB | largest, GB | "
    yield "publish, GB | pause | checkpoint, GB |\n|" + "---|" * 12 + "\n"
    for name, gpus, each, values in ADAPTED_ROWS:
        one = adapted_row(name, gpus, values)
        t, colocated = one.trainer, one.config.cluster.placement == "colocated"
        quantized = one.config.trainer.lora.base
        trained = ("weights", "gradients", "masters", "moments")
        cells = [
            name,
            f"{gpus} × {each / 1e9:.0f} GB",
            "in turns" if colocated else f"{one.config.trainer.world_size} train",
            one.config.trainer.dtype if quantized == "none" else quantized,
            gb(t["frozen base"]),
            gb(sum(t[part] for part in trained)),
            gb(sum(t.values())),
            gb(sum(one.engine.values())),
            gb(most_on_gpu(one)),
            f"{gb(one.publish.nbytes)}, {one.config.weights.lora}",
            f"{one.publish.pause:.2g}",
            gb(checkpoint(one)),
        ]
        yield "| " + " | ".join(cells) + " |\n"


def commands() -> Iterator[str]:
    """Yield the overrides of each row in addition to its experiment."""
    yield "```\n"
    for name, gpus, values in ROWS:
        if values:
            yield f"{gpus:>5}  experiment={name} {' '.join(settings(values))}\n"
    yield "```\n"


def text() -> str:
    """Return the text between the marks."""
    return "\n".join("".join(part) for part in (table(), parts_table(), adapted_table(), commands()))


def documented() -> tuple[str, str]:
    """Return results/sizes.md as it is, and as it should be."""
    now = DOCS.read_text()
    before, rest = now.split(BEGIN)
    return now, f"{before}{BEGIN}\n{text()}\n{END}{rest.split(END)[1]}"


# -- one run -----------------------------------------------------------------------------------------------


def told(config: Config, hf: dict[str, Any]) -> Iterator[str]:
    """Yield lines about each part of one run."""
    one = size(config, hf)
    trainers, engines = config.trainer.world_size, config.engine.started * config.engine.ranks
    yield f"{one.machines} machines, {trainers} GPUs train, {engines} generate"
    for role, parts in (("trainer", one.trainer), ("engine", one.engine)):
        told = ", ".join(f"{part} {gb(bytes_)}" for part, bytes_ in parts.items() if bytes_)
        yield f"a rank of the {role}: {gb(sum(parts.values()))} of {gb(HARDWARE.memory)} GB ({told})"
    sent = one.publish
    counts = "+".join(map(str, sent.buckets))
    yield f"a publish: {gb(sent.nbytes)} GB in {counts} buckets, {sent.fill:.2g} s to fill, {sent.pause:.2g} s of pause"
    yield f"tokens/s: {one.balance.trainers:,.0f} trained, {one.balance.engines:,.0f} written, were neither to wait"
    yield f"a step: {one.batch_tokens / 1e6:.3g} million tokens in {one.step:.0f} s"
    yield f"the rollout process: {one.core:.2f} of its one core for what engines stream"


def main(arguments: Sequence[str]) -> int:
    """Run the script. Return 1 if --check finds a difference."""
    if arguments and arguments[0] != "--check":
        config = load(*arguments)
        file = Path(config.model.path).expanduser() / "config.json"
        known = {**MODELS, **ADAPTED, **SEEING}
        hf = known[config.run.name] if config.model.path == "MODEL" else json.loads(file.read_text())
        print(*told(config, hf), sep="\n")
        return 0
    now, then = documented()
    if now != then and not arguments:
        DOCS.write_text(then)
    if now != then:
        print(f"{'differs' if arguments else 'wrote'}: {DOCS}")
    return int(bool(arguments) and now != then)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
