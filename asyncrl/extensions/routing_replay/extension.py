"""What this folder adds: routing replay for mixtures of experts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from asyncrl import extension
from asyncrl.errors import ConfigError
from asyncrl.settings import Section

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.network.addresses import Addresses
    from asyncrl.trainer.policy import Policy

FIELD = "routing_replay.kind"


class RoutingReplaySettings(Section):
    """Routing replay (asyncrl/extensions/routing_replay/README.md)."""

    kind: Literal["none", "R2", "R3"] = "none"
    """Experts that a mixture-of-experts model's routers are forced to use in the policy's passes. R2: those that the
    trainer's routers chose before the batch's first optimizer step; R3: those that the engines chose for each token."""


class RoutingLaunch(extension.LaunchHooks):
    """The check of the policy's model."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def check_model(self, config: Config, model: dict[str, Any], gpus: int) -> Iterator[ConfigError]:
        """Refuse models without routers, and with R3 those whose engines do not report what the trainer needs."""
        if self._kind == "none":
            return
        from asyncrl.extensions.routing_replay.encoding import routing_shape
        from asyncrl.models.families import family_of

        if routing_shape(model) is None:
            yield ConfigError(FIELD, self._kind, "The model has no routed experts: set none.")
        if self._kind == "R3" and not family_of(model).serving.reports_experts:
            name = model["architectures"][0].removesuffix("ForCausalLM")
            remedy = f"SGLang's {name} does not report its experts: set R2 or none."
            yield ConfigError(FIELD, self._kind, remedy)


class RoutingEngines(extension.EngineHooks):
    """The argument with which engines report the experts of tokens."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def arguments(self, config: Config, *, gpu: bool) -> dict[str, Any]:
        """Return the argument, with R3."""
        return {"enable_return_routed_experts": True} if self._kind == "R3" else {}


class RoutingReplayExtension(extension.Extension):
    """The section routing_replay."""

    Settings = RoutingReplaySettings
    metrics = {  # noqa: RUF012
        "router/differs": "fraction of routing decisions whose replayed experts differ from the choice of the "
        "trainer's router",
        "router/overlap": "mean fraction of replayed experts that the trainer's router would have chosen too",
    }
    """Over tokens and layers with experts, in the passes with gradient."""

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse what would replay nothing, or the experts of other tokens."""
        kind = self.settings.kind
        if kind == "R2" and config.algo.steps == 1:
            remedy = "With one optimizer step there is nothing to replay: raise algo.mini_batches, or set none."
            yield ConfigError(FIELD, kind, remedy)
        if kind != "none" and config.mode == "sft":
            yield ConfigError(FIELD, kind, "No engine routes: set none.")
        if kind != "R3" or not config.generates:
            return
        if config.engine.speculates:
            remedy = "SGLang moves accepted drafts in the KV cache without their experts, and lacks room for them: "
            yield ConfigError(FIELD, kind, remedy + "remove engine.server_args.speculative_algorithm.")
        if config.engine.hicache is not None:
            remedy = "SGLang forgets which experts a token had when its cache moves to host memory: "
            yield ConfigError(FIELD, kind, remedy + "unset engine.hicache, or set none or R2.")

    def launch(self) -> extension.LaunchHooks:
        """Return the check of the model."""
        return RoutingLaunch(self.settings.kind)

    def engine(self) -> extension.EngineHooks:
        """Return the argument of engines."""
        return RoutingEngines(self.settings.kind)

    def player(self, config: Config, addresses: Addresses) -> extension.PlayerHooks:
        """Return what asks engines for the experts of each token, with R3."""
        if self.settings.kind != "R3":
            return extension.PlayerHooks()
        from asyncrl.extensions.routing_replay.answers import ReportedExperts
        from asyncrl.extensions.routing_replay.encoding import shape_of
        from asyncrl.models.architectures import flat

        return ReportedExperts(shape_of(flat(json.loads((addresses.model / "config.json").read_text()))))

    def trainer(self, policy: Policy) -> extension.TrainerHooks:
        """Return the replay in the policy's routers."""
        if self.settings.kind == "none":
            return extension.TrainerHooks()
        from asyncrl.extensions.routing_replay.encoding import shape_of
        from asyncrl.extensions.routing_replay.routers import RoutingReplay

        return RoutingReplay(self.settings.kind, policy.network, shape_of(policy.hf), policy.parallel)


Own = RoutingReplayExtension
