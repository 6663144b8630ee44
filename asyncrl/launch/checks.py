"""What the model, the machine and the task rule out, refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl import tasks
from asyncrl.config import Config, on_gpu
from asyncrl.errors import ConfigError
from asyncrl.models.architectures import check_architecture


def check_model(config: Config, hf: dict[str, Any]) -> None:
    """Refuse models and layouts that cannot be built; `hf` is the model folder's config.json."""
    check_architecture(hf)
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads", hf["num_attention_heads"])
    for field, degree in (
        ("trainer", config.trainer.tensor_parallel),
        ("engine", config.engine.tensor_parallel),
    ):
        for what, number in (("attention heads", heads), ("key-value heads", kv_heads)):
            if number % degree:
                divisors = [d for d in range(1, number + 1) if heads % d == 0 and kv_heads % d == 0]
                raise ConfigError(
                    f"{field}.tensor_parallel",
                    degree,
                    f"Must divide the model's {number} {what}: one of {divisors}.",
                )
    layers = hf["num_hidden_layers"]
    if layers % config.trainer.pipeline_parallel:
        raise ConfigError(
            "trainer.pipeline_parallel",
            config.trainer.pipeline_parallel,
            f"Must divide the model's {layers} layers.",
        )
    longest = hf.get("max_position_embeddings", 0)
    if config.rollout.max_new_tokens >= longest:
        raise ConfigError(
            "rollout.max_new_tokens",
            config.rollout.max_new_tokens,
            f"Must leave room for a prompt within the model's {longest} positions.",
        )


def check_devices(config: Config, gpus: int) -> None:
    """Refuse more GPU ranks than GPUs; on CPU any number of processes may share the cores."""
    wanted = 0
    for name, section, ranks in (
        ("trainer", config.trainer, config.trainer.world_size),
        ("engine", config.engine, config.engine.count * config.engine.tensor_parallel),
    ):
        if section.device == "cuda" and gpus == 0:
            raise ConfigError(f"{name}.device", "cuda", "This machine shows no GPU: use cpu or auto.")
        wanted += ranks if on_gpu(section, gpus) else 0
    if wanted > gpus:
        raise ConfigError(
            "trainer × engine ranks",
            wanted,
            f"The machine has {gpus} GPUs: lower trainer.tensor_parallel, pipeline_parallel or data_parallel "
            f"({config.trainer.world_size} ranks), or engine.count × engine.tensor_parallel.",
        )


def check_files(config: Config) -> None:
    """Refuse a task that cannot be built and a chat template that is not there."""
    tasks.build(config.task)
    template = config.model.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        raise ConfigError("model.chat_template", template, "No such file: name a jinja file.")
