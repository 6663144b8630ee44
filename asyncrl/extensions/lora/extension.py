"""What this folder adds: adapters on a frozen base, and engines that serve each version as adapters of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extension import EngineHooks, Extension, LaunchHooks, TrainerHooks
from asyncrl.extensions.lora import rules
from asyncrl.settings import Rule, value_of

if TYPE_CHECKING:
    from asyncrl.engine.served import ServedWeights
    from asyncrl.launch.checks.findings import Finding
    from asyncrl.launch.prepare import Preparation
    from asyncrl.network.addresses import Addresses
    from asyncrl.trainer.policy import Policy
    from asyncrl.trainer.publishers import Publishing
    from asyncrl.trainer.transformation import Transformation
    from asyncrl.weights.publish import StagedPublisher


class LoraLaunch(LaunchHooks):
    """Chooses how versions reach the engines, and refuses models and checkpoints that do not fit."""

    def __init__(self) -> None:
        self._way = ""

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Refuse models whose adapters cannot be trained or served, and a folder of others to start from."""
        from asyncrl.extensions.lora.peft_config import check_start

        yield from _broken(config, rules.of_model(config, model))
        if config.trainer.lora.path:
            check_start(config.trainer.lora, config.agents.adapters)

    def resolved(self, config: Config, model: dict[str, Any], gpus: int) -> Config:
        """Choose weights.lora, and the layers that compute with a base in a format of its own."""
        from asyncrl.extensions.lora.choice import choose_lora

        if config.trainer.lora.base != "none" and config.trainer.layers == "auto":
            config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"layers": "local"})})
        config, self._way = choose_lora(config, model, gpus)
        return config

    def refuse(self, prepared: Preparation) -> None:
        """Refuse to resume a checkpoint of other adapters."""
        from asyncrl.extensions.lora.resuming import check_adapters

        if prepared.origin:
            check_adapters(prepared.config, prepared.origin.manifest)

    def preflight(self, prepared: Preparation) -> Iterator[Finding]:
        """Report how versions reach the engines."""
        from asyncrl.launch.checks.findings import ok

        if self._way:
            yield ok("weights.lora", self._way)

    def notes(self, prepared: Preparation) -> list[str]:
        """Return how versions reach the engines, and why."""
        return [f"weights.lora {self._way}"] if self._way else []


class LoraEngines(EngineHooks):
    """Lets engines serve adapters."""

    def arguments(self, config: Config, *, gpu: bool) -> dict[str, Any]:
        """Return the arguments of engines that serve adapters.

        SGLang holds the adapters of one batch in a pool of equal slots, one of them for the base. Requests for a
        further adapter would wait in silence, so the pool has room for all that may be resident. Without strict
        loading, tensors with unknown names would be skipped.
        """
        if not rules.serves(config):
            return {}
        lora = config.trainer.lora
        return {
            "enable_lora": True,
            "lora_backend": None if gpu else "torch_native",  # the others are compiled kernels
            "max_lora_rank": lora.rank,
            "lora_target_modules": rules.adapter_targets(lora),
            "max_loras_per_batch": rules.engine_slots(config),
            "lora_strict_loading": True,
        }

    def needs_weights(self, config: Config) -> bool:
        """Return whether version 0 is not the model folder itself: it has adapters, or a base in another format."""
        lora = config.trainer.lora
        return lora.rank is not None and (lora.path is not None or lora.base != "none")

    def keeps_versions(self, config: Config) -> bool:
        """Return whether every version is an adapter of its own."""
        return rules.serves(config)

    def install(self, argv: Sequence[str]) -> None:
        """Patch how SGLang unloads an adapter."""
        from asyncrl.extensions.lora.hooks import wait_for_requests
        from asyncrl.import_hooks import after_import

        after_import("sglang.srt.managers.tokenizer_manager", wait_for_requests)


class LoraTrainers(TrainerHooks):
    """Publishes adapters."""

    def publisher(self, publishing: Publishing) -> tuple[StagedPublisher, str] | None:
        """Return the publisher of versions as adapters, if they are sent alone."""
        from asyncrl.extensions.lora.publish import build

        return build(publishing)


class Lora(Extension):
    """trainer.lora, weights.lora and agents.roles."""

    enables = ("trainer.lora.rank",)
    metrics = {  # noqa: RUF012
        "adapters/resident": "number of adapters that every engine held before this publish unloaded those not in use",
    }
    """With weights.lora=versions."""

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse settings that do not fit adapters, or roles with adapters of their own."""
        return _broken(config, chain(rules.roles(config), rules.served(config), rules.others(config)))

    def launch(self) -> LoraLaunch:
        """Return what the launcher asks."""
        return LoraLaunch()

    def engine(self) -> LoraEngines:
        """Return what engines with adapters need."""
        return LoraEngines()

    def served(self, config: Config, addresses: Addresses) -> ServedWeights:
        """Return the choice of the adapter that answers a request."""
        from asyncrl.extensions.lora.served import served_adapters

        return served_adapters(config, addresses)

    def transformation(self, config: Config) -> Transformation | None:
        """Return the adapters, if the run trains some."""
        from asyncrl.extensions.lora.transformation import transformation_of

        return transformation_of(config.trainer.lora, config.agents)

    def trainer(self, policy: Policy) -> LoraTrainers:
        """Return the publisher's hook."""
        return LoraTrainers()


def _broken(config: Config, checked: Iterable[Rule]) -> Iterator[ConfigError]:
    """Yield an error for each rule that is broken."""
    for field, *shown, broken, remedy in checked:
        if broken:
            yield ConfigError(field, shown[0] if shown else value_of(config, field), remedy)


Own = Lora
