"""PEFT's adapter_config.json and the names of its tensors: written for users, and checked in folders of other origin.
Imports no torch, because the launcher reads such folders too.

Routed experts of a layer are two tensors in transformers 5, which PEFT adapts through `target_parameters`. With these,
it moves gate_proj, up_proj and down_proj from `target_modules` to the experts. Dense layers and shared experts beside
them are therefore targeted by their weights: gate_proj.weight, up_proj.weight, down_proj.weight.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.lora import LoraConfig
from asyncrl.errors import ConfigError, WeightsError

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""Transformers' parameters of a layer's routed experts."""
PREFIX = "base_model.model."
INSIDE = ".language_model."
"""Part of the names of modules of a text model inside a model that sees."""
_TENSOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_EXPERTS = re.compile(r"(.*\.)mlp\.experts(\.base_layer)?")
_MLP = ("gate_proj", "up_proj", "down_proj")
_IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
"""Fields without effect on what stored adapters compute. The tensors say which modules have an adapter."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations that subtract the adapter's start from the base weights, which the folder does not hold."""


@dataclass(frozen=True)
class AdapterConfig:
    """Rank and scale of the adapters in a PEFT folder, and the modules of which it names others, by the ends of their
    names as in transformers."""

    rank: int
    alpha: float
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """Factor of the adapters of all other modules."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read and check adapter_config.json. Raises WeightsError if it cannot be read, and ConfigError with a field whose
    adapters are not plain LoRA."""
    file = folder / CONFIG
    try:
        found: dict[str, Any] = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} cannot be read: {error}. Give a folder of PEFT's save_pretrained.") from None
    _check_kind(file, found)
    config = AdapterConfig(
        rank=positive(file, "r", found.pop("r", None), int),
        alpha=positive(file, "lora_alpha", found.pop("lora_alpha", None), int | float),
        rslora=bool(found.pop("use_rslora", False)),
        rank_pattern=found.pop("rank_pattern", None) or {},
        alpha_pattern=found.pop("alpha_pattern", None) or {},
        parameters=tuple(found.pop("target_parameters", None) or ()),
    )
    for name, value in found.items():
        if name not in _IGNORED and value and value != "none":
            raise ConfigError(f"{file}: {name}", value, "Only plain LoRA is supported: merge this adapter with PEFT.")
    return config


def _check_kind(file: Path, found: dict[str, Any]) -> None:
    if (kind := found.pop("peft_type", None)) != "LORA":
        raise ConfigError(f"{file}: peft_type", kind, "Only LORA is supported: merge this adapter with PEFT.")
    start = found.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGES_BASE):
        raise ConfigError(
            f"{file}: init_lora_weights",
            start,
            "This initialization changes the base weights. Save the adapter with PEFT's "
            "path_initial_model_for_weight_conversion, which turns it into plain LoRA.",
        )


def positive(file: Path, name: str, value: Any, kind: Any) -> Any:
    """Return a value that must be a positive number."""
    if not isinstance(value, kind) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"{file}: {name}", value, "It must be a positive number: copy the folder again.")
    return value


def adapter_folders(root: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return the PEFT folder of each adapter: `root` itself for a single one, else one below it."""
    return {name: root / name for name in names} if len(names) > 1 else dict.fromkeys(names, root)


# --- tensors ------------------------------------------------------------------------------------------------


def parsed(name: str) -> tuple[str, str]:
    """Return the module of an adapter's tensor, and A or B. Raises WeightsError."""
    if found := _TENSOR.fullmatch(name.removeprefix(PREFIX)):
        return found[1], found[2]
    raise WeightsError(
        f"{name} is not a linear layer's lora_A.weight or lora_B.weight. Adapters of embeddings, trained copies of "
        "modules and other methods are not supported: merge the adapter with PEFT."
    )


def open_adapters(folder: Path, framework: str) -> Any:
    """Open the tensors of a PEFT folder. Raises WeightsError."""
    from safetensors import SafetensorError, safe_open

    file = folder / TENSORS
    if (folder / PICKLE).exists() and not file.exists():
        raise WeightsError(
            f"{folder / PICKLE} is a pickle, which can run code, and is not read. If you trust it, load it with PEFT "
            "and save it with safe_serialization=True."
        )
    try:
        return safe_open(file, framework=framework).__enter__()
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{file} cannot be read: {error}. Copy or export it again.") from None


def adapted(config: AdapterConfig, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the modules of these tensors, and for each the names of its A and B. Raises WeightsError for a tensor that
    is not plain LoRA."""
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for name in names:
        module, letter = parsed(name)
        modules[_parameter(config, module)][letter] = name
    return modules


def _parameter(config: AdapterConfig, module: str) -> str:
    """Return the parameter that PEFT's wrapper of a layer's experts adapts; any other module as it is."""
    experts = _EXPERTS.fullmatch(module)
    if experts is None:
        return module
    whole = [name for name in (GATE_UP, DOWN) if any(f".{name}".endswith(f".{one}") for one in config.parameters)]
    if not whole or (experts[2] and len(whole) == 1):
        raise WeightsError(f"{module} has an adapter, but target_parameters in {CONFIG} does not name it")
    return experts[1] + whole[0 if experts[2] else -1]


def check_start(lora: LoraConfig, names: Sequence[str]) -> None:
    """Check that the adapters of these names in `lora.path` are those of the settings. Raises ConfigError or
    WeightsError."""
    assert lora.path is not None
    for folder in adapter_folders(Path(lora.path).expanduser(), names).values():
        _check_folder(lora, folder)


def _check_folder(lora: LoraConfig, folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError("trainer.lora.path", lora.path, f"There is no folder {folder}: name one of PEFT.")
    if lora.rank is None:
        raise ConfigError("trainer.lora.path", lora.path, "Set trainer.lora.rank to the rank of these adapters.")
    config = read_adapter_config(folder)
    modules = adapted(config, open_adapters(folder, "numpy").keys())
    if others := {**config.rank_pattern, **config.alpha_pattern}:
        raise ConfigError(
            "trainer.lora.path",
            lora.path,
            f"Its adapters have several ranks and scales, {others}, but a run trains one: merge it into the model with "
            "asyncrl-convert merge.",
        )
    if config.rank != lora.rank:
        remedy = f"The adapters in {folder} have rank {config.rank}: set that."
        raise ConfigError("trainer.lora.rank", lora.rank, remedy)
    if not math.isclose(config.scale, lora.scale):
        remedy = f"The adapters in {folder} have the scale {config.scale:g}: set "
        raise ConfigError("trainer.lora.alpha", lora.alpha, f"{remedy}{config.scale * lora.alpha / lora.scale:g}.")
    names = {module.rpartition(".")[2] for module in modules}
    if lora.targets != "all" and names != {*lora.targets}:
        raise ConfigError("trainer.lora.targets", lora.targets, f"{folder} has adapters of {sorted(names)}: set these.")


# --- writing ------------------------------------------------------------------------------------------------


def user_config(lora: LoraConfig, tensors: Collection[str], base: str) -> dict[str, Any]:
    """Return adapter_config.json for users of PEFT, given the names of the tensors. `base` is the model's folder."""
    assert lora.rank is not None
    experts, dense = [], set()
    for module in sorted({parsed(name)[0] for name in tensors}):
        stacked = [name for name in (GATE_UP, DOWN) if module.endswith(f".{name}")]
        experts += stacked
        dense |= set() if stacked else {module.rpartition(".")[2]}
    weights = dense & {*_MLP} if experts else set()
    modules: str | list[str] = sorted(dense - weights)
    if any(INSIDE in name for name in tensors):  # else PEFT would adapt layers of the same names in the vision tower
        modules = rf".*{re.escape(INSIDE)}.*\.({'|'.join(modules)})"
    parameters = [*sorted(set(experts)), *(f"{name}.weight" for name in sorted(weights))]
    return {
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,  # PEFT declares an integer
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": modules,
        "use_dora": False,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "init_lora_weights": True if lora.init == "default" else lora.init,
        # PEFT refuses dropout for target_parameters; it has no effect on inference.
        "lora_dropout": 0.0 if parameters else lora.dropout,
        "target_parameters": parameters or None,
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.rslora,
    }
