"""Resolution of `trainer.layers: auto`.

TransformerEngine's layers round differently from Megatron's own, so a run that is resumed or replayed keeps the layers
of the earlier one. The launcher writes the result to config.json, which every rank reads.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from asyncrl.config import Config, on_gpu
from asyncrl.errors import ConfigError

AUTO, TRANSFORMER_ENGINE, LOCAL = "auto", "transformer_engine", "local"
PACKAGES = ("transformer_engine", "transformer_engine_torch")
"""TransformerEngine's Python modules, and its compiled extension."""


def resolve(config: Config, gpus: int, before: dict[str, Any] | None = None) -> Config:
    """Return the configuration with the trainer's layers resolved. `gpus` is the number of GPUs of a machine, `before`
    the resolved configuration of the run that is resumed or replayed. Raises ConfigError if the machine cannot run
    them."""
    trainer = config.trainer
    layers: str = trainer.layers
    if layers == AUTO and before is not None:
        layers = before.get("trainer", {}).get("layers", LOCAL)  # runs without this setting had the local ones
    problem, quantized = _problem(on_gpu(trainer, gpus)), trainer.lora.base != "none"
    if layers == AUTO:
        layers = LOCAL if problem or quantized or not config.trains else TRANSFORMER_ENGINE
    elif layers == TRANSFORMER_ENGINE and problem and config.trains:
        raise ConfigError("trainer.layers", layers, f"{problem}, or set local.")
    elif layers == TRANSFORMER_ENGINE and quantized:
        remedy = "Megatron's own layers alone compute with a quantized base (trainer.lora.base): set local."
        raise ConfigError("trainer.layers", layers, remedy)
    if trainer.fp8 and layers == LOCAL and config.trains:
        remedy = f"Only layers of TransformerEngine have it ({problem or 'trainer.layers=local'}): set fp8=null."
        raise ConfigError("trainer.fp8", trainer.fp8.format, remedy)
    if trainer.optimizer.moments_dtype != "float32" and problem and config.trains:
        remedy = f"Only TransformerEngine's FusedAdam has such moments, and {problem}, or set float32."
        raise ConfigError("trainer.optimizer.moments_dtype", trainer.optimizer.moments_dtype, remedy)
    return config.model_copy(update={"trainer": trainer.model_copy(update={"layers": layers})})


def _problem(gpu: bool) -> str | None:
    """Return why TransformerEngine's layers cannot run, with a remedy; None if they can."""
    if not gpu:
        return "TransformerEngine has no CPU kernels: run the trainer on GPUs"
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        return f"{' and '.join(missing)} cannot be found here: install requirements/gpu.txt"
    return None
