"""What this folder adds: engines with pipeline stages or replicas of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from asyncrl import lookup
from asyncrl.errors import ConfigError
from asyncrl.extension import EngineHooks, Extension, LaunchHooks
from asyncrl.settings import value_of

if TYPE_CHECKING:
    from asyncrl.config import Config

REPLICAS, STAGES = "engine.data_parallel", "engine.pipeline_parallel"
Shaped = Iterator[tuple[str, bool, str]]
"""Rules of a shape: a setting, whether its value breaks the rule, and the remedy."""


class ShapedLaunch(LaunchHooks):
    """Refuses what SGLang cannot give a model, or cannot do in these shapes."""

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Yield the problems of this model's engines."""
        for field, broken, remedy in (*_replicas(config, model), *_stages(config, model)):
            if broken:
                yield ConfigError(field, value_of(config, field), remedy)


class ShapedEngines(EngineHooks):
    """Patches SGLang."""

    def install(self, argv: Sequence[str]) -> None:
        """Patch SGLang's classes for the shape of this engine."""
        from asyncrl.extensions.shapes import hooks

        hooks.install(argv)


def _replicas(config: Config, model: dict[str, Any]) -> Shaped:
    from asyncrl.models.families import known_families

    if config.engine.data_parallel == 1:
        return
    replicated = tuple(name for name, family in known_families().items() if family.serving.replicates)
    why = f"SGLang replicates the attention of {replicated} alone: set 1."  # others divide their heads over all ranks
    yield REPLICAS, model["architectures"][0] not in replicated, why
    yield REPLICAS, config.keeps_versions, "Adapters in engines were tried with one replica alone: set 1."
    tied = model.get("tie_word_embeddings", False)
    yield REPLICAS, tied, "A tied output layer was not tried with several replicas: set 1."


def _stages(config: Config, model: dict[str, Any]) -> Shaped:
    from asyncrl.models.families import family_of

    stages = config.engine.pipeline_parallel
    if stages == 1:
        return
    family, layers, serving = model["architectures"][0], model["num_hidden_layers"], family_of(model).serving
    yield STAGES, not serving.stages, f"SGLang has no stages of {family}: set 1."
    sees = family_of(model).tower is not None
    yield STAGES, sees, "SGLang's stages of models with images were not tried: set 1."
    yield STAGES, config.keeps_versions, "Adapters in engines were tried with one stage alone: set 1."
    tied = model.get("tie_word_embeddings", False) and not serving.tied_stages
    yield STAGES, tied, f"SGLang's {family} has no tied output layer on the last stage: set 1."
    yield STAGES, layers < stages, f"There are only {layers} layers: lower it."
    pauses = config.mode == "train" and config.weights.pause_mode not in ("abort", "drain")
    why = "SGLang does not pause the steps that are between stages: set weights.pause_mode=abort or drain."
    yield STAGES, pauses, why
    reports = "enable_return_routed_experts" in lookup.engine_arguments(config, gpu=True)
    yield STAGES, reports, "Engines cannot report routed experts of other stages: set 1, or routing_replay.kind=none."


class Shapes(Extension):
    """engine.data_parallel and engine.pipeline_parallel above 1."""

    enables = (REPLICAS, STAGES)

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse stages in engines that others started."""
        if config.engine.urls and config.engine.pipeline_parallel > 1:
            remedy = "The stock server cannot take weights on several stages: start engines by engine.count."
            yield ConfigError(STAGES, config.engine.pipeline_parallel, remedy)

    def launch(self) -> ShapedLaunch:
        """Return what the launcher asks."""
        return ShapedLaunch()

    def engine(self) -> ShapedEngines:
        """Return what patches SGLang."""
        return ShapedEngines()


Own = Shapes
