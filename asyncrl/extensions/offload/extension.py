"""What this folder adds: activations in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from asyncrl.extension import Extension, LaunchHooks, TrainerHooks
from asyncrl.settings import Section

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.config import Config
    from asyncrl.trainer.network import Network
    from asyncrl.trainer.policy import Policy


class OffloadSettings(Section):
    """Memory of trainers that is moved to their hosts (asyncrl/extensions/offload/README.md)."""

    activations: bool = False
    """Keep what layers save for backward in host memory until backward needs it, so that a rank holds the activations
    of two layers. With trainer.recompute.granularity=full these are their inputs only."""


class OffloadLaunch(LaunchHooks):
    """What the estimates of memory need to know."""

    def __init__(self, settings: OffloadSettings) -> None:
        self._settings = settings

    def memory(self, config: Config) -> dict[str, int]:
        """Return two layers: the one that runs, and the one whose activations move."""
        return {"layers_held": 2} if self._settings.activations else {}


class OffloadTrainer(TrainerHooks):
    """Moves the activations of every network of a rank."""

    def __init__(self, policy: Policy) -> None:
        from asyncrl.extensions.offload.activation_offload import ActivationOffload

        self.offloads = [ActivationOffload(partial(_resident, network)) for network in policy.networks()]
        for network, offload in zip(policy.networks(), self.offloads, strict=True):
            network.around_forward.append(offload.micro_batch)
            for chunk in network.chunks:
                for layer in chunk.decoder.layers:
                    layer.register_forward_pre_hook(offload.next_layer)


def _resident(network: Network) -> Iterator[Tensor]:
    """Yield what autograd saves in a pass although it is no activation."""
    from asyncrl.trainer.layers import fp8_weights

    for chunk in network.chunks:
        yield from (*chunk.parameters(), *chunk.buffers(), *fp8_weights(chunk))


class Offload(Extension):
    """The section offload."""

    Settings = OffloadSettings
    trains = False

    def launch(self) -> OffloadLaunch:
        """Return what the launcher needs."""
        return OffloadLaunch(self.settings)

    def trainer(self, policy: Policy) -> TrainerHooks:
        """Return the hooks that move activations, if they are asked for."""
        return OffloadTrainer(policy) if self.settings.activations else TrainerHooks()


Own = Offload
