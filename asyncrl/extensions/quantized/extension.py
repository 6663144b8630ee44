"""What this folder adds: engines with quantized weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.config import Config, on_gpu
from asyncrl.errors import ConfigError
from asyncrl.extension import EngineHooks, Extension, LaunchHooks, TrainerHooks
from asyncrl.extensions.quantized import fits
from asyncrl.models.families import family_of
from asyncrl.settings import Section

if TYPE_CHECKING:
    from asyncrl.trainer.policy import Policy
    from asyncrl.weights.checksum import SentWeights

CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [fits.BLOCK, fits.BLOCK], "activation_scheme": "dynamic"},
    "int8": {"quant_method": "w8a8_int8"},
}
"""What the config.json of a folder with such weights says, by format."""


class QuantizedSettings(Section):
    """Precision of the weights in the engines."""

    format: Literal["none", "fp8", "int8", "fp8_simulated", "int8_simulated"] = "none"
    """Format of the weights of the layers' linear maps. fp8: e4m3 in blocks of 128 x 128; int8: a scale for each output
    channel; both need GPUs. fp8_simulated, int8_simulated: the same values, in engine.dtype, on any machine."""

    @property
    def holds_codes(self) -> bool:
        """Return whether engines hold codes and scales, not the values that they stand for."""
        return self.format in CONFIGS


class QuantizedLaunch(LaunchHooks):
    """Refuses what engines with codes cannot hold."""

    def __init__(self, settings: QuantizedSettings) -> None:
        self._format = settings.format
        self._kind = settings.format if settings.holds_codes else None

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Refuse models of which an engine cannot hold codes."""
        family = family_of(model)
        if self._format != "none" and (family.stacks or not family.adapters):
            what = "stacked experts" if family.stacks else "fused layers"
            yield ConfigError("quantized.format", self._format, f"The model's files have {what}: set none.")
        if self._kind and config.mode == "train":
            yield from fits.model(self._kind, model, config.engine.parallel, gpu=on_gpu(config.engine, gpus))

    def check_gpu(self, config: Config, gpu: str) -> Iterator[ConfigError]:
        """Refuse GPUs on which SGLang loads no second version."""
        if self._kind:
            yield from fits.gpu(self._kind, gpu, config.engine.server_args)

    def memory(self, config: Config) -> dict[str, int]:
        """Return the byte of a code."""
        return {"linear_bytes": 1} if self._kind else {}


class QuantizedEngines(EngineHooks):
    """Starts engines with random codes, which the trainers' first version replaces before any request."""

    def __init__(self, settings: QuantizedSettings) -> None:
        self._settings = settings

    def arguments(self, config: Config, *, gpu: bool) -> dict[str, Any]:
        """Return the arguments with which SGLang builds layers for codes, whatever the model folder holds."""
        if not self._settings.holds_codes:
            return {}
        changes = {"quantization_config": CONFIGS[self._settings.format]}
        return {"load_format": "dummy", "json_model_override_args": json.dumps(changes)}

    def needs_weights(self, config: Config) -> bool:
        """Return whether the engines' weights are quantized."""
        return self._settings.format != "none"

    def install(self, argv: Sequence[str]) -> None:
        """Patch SGLang's quantized layers."""
        from asyncrl.extensions.quantized import layers

        layers.install(argv)


class QuantizedTrainers(TrainerHooks):
    """Quantizes what is sent."""

    def __init__(self, settings: QuantizedSettings, policy: Policy) -> None:
        self._kind, self._policy = settings.format, policy

    def sent(self, weights: SentWeights) -> SentWeights:
        """Return the weights with quantized linear maps."""
        if self._kind == "none":
            return weights
        import torch

        from asyncrl.extensions.quantized.codes import QuantizedWeights

        wide = getattr(torch, self._policy.config.engine.dtype)
        return QuantizedWeights(weights, self._policy.hf["architectures"][0], self._kind, wide)


class Quantized(Extension):
    """quantized.format."""

    Settings = QuantizedSettings
    settings: QuantizedSettings
    metrics = {  # noqa: RUF012
        "quantization/error": "norm of the error of the quantized weights that this rank sent, relative to that of the "
        "weights",
    }
    """Except for adapters, whose base is quantized once."""

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse settings that do not fit quantized engines."""
        return fits.settings(self.settings, config)

    def launch(self) -> QuantizedLaunch:
        """Return the checks."""
        return QuantizedLaunch(self.settings)

    def engine(self) -> QuantizedEngines:
        """Return what engines with codes need."""
        return QuantizedEngines(self.settings)

    def trainer(self, policy: Policy) -> QuantizedTrainers:
        """Return the quantizer."""
        return QuantizedTrainers(self.settings, policy)


Own = Quantized
