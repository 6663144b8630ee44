"""The model families that can be trained, by architecture: one module each, whose FAMILY is its record."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from asyncrl.errors import ConfigError
from asyncrl.models.family import HF, Family

_RECORDS: list[Family] = [import_module(f"{__name__}.{module.name}").FAMILY for module in iter_modules(__path__)]
FAMILIES = {record.architecture: record for record in _RECORDS}
OF_TYPE = {record.model_type: record for record in _RECORDS}
"""The same by transformers' name of the configuration."""
_CHOOSING = (row for record in _RECORDS for row in record.weights if row.megatron.endswith(".router.expert_bias"))
CHOOSES = tuple(sorted({row.hf[0].rpartition(".")[2] for row in _CHOOSING}))
"""Last names of biases that affect only which experts are chosen, and are float32 everywhere."""


def family_of(hf: HF) -> Family:
    """Return the record of a model's family. Raises ConfigError if there is none."""
    name = (hf.get("architectures") or ["none named"])[0]
    if name not in FAMILIES:
        raise ConfigError("model.path", name, f"Supported architectures: {sorted(FAMILIES)}.")
    return FAMILIES[name]
