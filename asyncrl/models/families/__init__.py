"""The model families that can be trained: one module each, whose FAMILY is its record, and those of extensions."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from asyncrl.errors import ConfigError
from asyncrl.lookup import offered
from asyncrl.models.family import HF, Family
from asyncrl.user_code import load


@cache
def known_families() -> dict[str, Family]:
    """Return the records of all families by architecture."""
    own = [import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)]
    further = [load(path, "model.path") for path in offered("families").values()]
    return {record.architecture: record for record in (*own, *further)}


def of_type(model_type: str) -> Family:
    """Return the record with this name of transformers' configuration."""
    return next(record for record in known_families().values() if record.model_type == model_type)


@cache
def choosing_biases() -> tuple[str, ...]:
    """Return the last names of biases that affect only which experts are chosen, and are float32 everywhere."""
    rows = (row for record in known_families().values() for row in record.weights)
    chosen = (row.hf[0] for row in rows if row.megatron.endswith(".router.expert_bias"))
    return tuple(sorted({name.rpartition(".")[2] for name in chosen}))


def family_of(hf: HF) -> Family:
    """Return the record of a model's family. Raises ConfigError if there is none."""
    name = (hf.get("architectures") or ["none named"])[0]
    if name not in known_families():
        raise ConfigError("model.path", name, f"Supported architectures: {sorted(known_families())}.")
    return known_families()[name]
