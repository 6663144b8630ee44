"""The section vision, families that see, a model to try them with, and where question files hold images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncrl import extension, lookup
from asyncrl.errors import ConfigError
from asyncrl.settings import Count, Positive, Section

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.launch.plan import ProcessSpec
    from asyncrl.network.addresses import Addresses

NO_CACHE = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
"""Keeps engines from answering with images that a former version of the tower encoded: neither an update nor
/flush_cache clears that cache."""


class VisionSettings(Section):
    """Models that see; without effect on text models."""

    tower: Literal["frozen", "trained"] = "frozen"
    """frozen: the tower keeps its weights, each image of a batch is encoded once, and only the text model is published.
    trained: the tower is trained and published too, and encodes an image in each pass; engines then cache no images."""
    lr: Positive | None = None
    """Peak learning rate of a trained tower, with the schedule of trainer.optimizer.lr; unset: trainer.optimizer.lr."""
    max_pixels: Count | None = None
    """Larger images are scaled down to at most this many pixels; unset: the maximum in the model's own
    preprocessor_config.json. An image takes one token for each square of (patch size x merge size) pixels."""
    max_images: Count = 8
    """Maximum number of images in one context."""
    max_bytes: Count = 20_000_000
    """Maximum size of an image file as it is given. Files of more than 40 million pixels are refused as well."""


def settings_of(config: Config) -> VisionSettings:
    """Return the section."""
    section = (config.model_extra or {})["vision"]
    assert isinstance(section, VisionSettings)
    return section


class VisionLaunch(extension.LaunchHooks):
    """The checks of models that see, and the environment of their engines."""

    def __init__(self, settings: VisionSettings) -> None:
        self._trains = settings.tower == "trained"

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Yield every problem of a model that sees."""
        from asyncrl.models.families import family_of

        if family_of(model).tower:
            rules = [*_rules(config, model), *(_rules_of_training(config, model) if self._trains else ())]
            yield from (ConfigError(field, value, why) for field, value, broken, why in rules if broken)

    def changed(self, config: Config, spec: ProcessSpec, addresses: Addresses, run_dir: Path) -> ProcessSpec:
        """Return an engine of the policy without a cache of images, if the tower is trained."""
        if not self._trains or not spec.name.startswith("engine-"):
            return spec
        return replace(spec, env={**spec.env, **NO_CACHE})

    def memory(self, config: Config) -> dict[str, int]:
        """Return whether the tower is trained."""
        return {"tower_trained": int(self._trains)}


def _rules(config: Config, model: dict[str, Any]) -> Iterator[tuple[str, Any, bool, str]]:
    """Yield the rules of a model that sees. It cannot be trained with what reads images with another vision tower than
    the policy's, or under another distribution than the one without image tokens."""
    from asyncrl.extensions.vision.sizes import deepstack

    trainer, path = config.trainer, config.algo.kl.reference_path
    reports = "enable_return_routed_experts" in lookup.engine_arguments(config, gpu=True)
    why = "The reference sees with the policy's vision tower: unset it, or choose a text model."
    yield "algo.kl.reference_path", path, bool(path), why
    why = "Engines report the experts of each token of an image, and answers count an image once: set R2 or none."
    yield "routing_replay.kind", "R3", reports, why
    levels, first = deepstack(model), trainer.split.chunk_layers(model["num_hidden_layers"])[0][0]
    field = "virtual_pipeline" if trainer.virtual_pipeline > 1 else "pipeline_parallel"
    why = f"The first {levels} layers add features of images, and must be on the first stage: set fewer stages."
    yield f"trainer.{field}", getattr(trainer, field), levels > len(first), why


def _rules_of_training(config: Config, model: dict[str, Any]) -> Iterator[tuple[str, Any, bool, str]]:
    """Yield the rules of a tower that is trained."""
    from asyncrl.extensions.vision.sizes import deepstack

    trainer, levels = config.trainer, bool(deepstack(model))
    why = "Adapters are trained on frozen weights: set frozen."
    yield "vision.tower", "trained", trainer.lora.rank is not None, why
    recomputed = trainer.recompute.granularity
    why = "Recomputed layers would repeat the backward pass of the vision tower whose features they add: set none."
    yield "trainer.recompute.granularity", recomputed, levels and recomputed == "full", why
    unknown = levels or config.engine.tensor_parallel > 1
    why = "How engines of this model or layout lay out a trained vision tower is not known: set it to false."
    yield "weights.verify", True, config.weights.verify and unknown, why


class VisionExtension(extension.Extension):
    """Models that see, from their questions to their gradients."""

    Settings = VisionSettings
    families = {  # noqa: RUF012
        "Qwen2_5_VLForConditionalGeneration": "asyncrl.extensions.vision.qwen2_5_vl:FAMILY",
        "Qwen3VLForConditionalGeneration": "asyncrl.extensions.vision.qwen3_vl:FAMILY",
        "Qwen3VLMoeForConditionalGeneration": "asyncrl.extensions.vision.qwen3_vl_moe:FAMILY",
    }
    builtin = {"tiny_vision": "asyncrl.extensions.vision.tiny:BUILTIN"}  # noqa: RUF012
    wrappers = {"image_key": "asyncrl.extensions.vision.questions:PicturedTask"}  # noqa: RUF012

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse gradients that are reduced while others are computed, with a trained tower."""
        if config.trainer.overlap_grad_reduce and self.settings.tower == "trained":
            why = "A micro-batch without images has no gradient of the tower to reduce: set it to false."
            yield ConfigError("trainer.overlap_grad_reduce", True, why)

    def launch(self) -> extension.LaunchHooks:
        """Return the checks of the model, and what changes its engines."""
        return VisionLaunch(self.settings)


Own = VisionExtension
