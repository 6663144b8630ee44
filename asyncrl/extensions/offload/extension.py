"""What this folder adds: activations in host memory between forward and backward, and optimizers between steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from asyncrl.extension import Extension, LaunchHooks, TrainerHooks
from asyncrl.settings import Section

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.config import Config
    from asyncrl.extensions.offload.activation_offload import ActivationOffload
    from asyncrl.trainer.network import Network
    from asyncrl.trainer.policy import Policy


class OffloadSettings(Section):
    """Memory of trainers that is moved to their hosts (asyncrl/extensions/offload/README.md)."""

    activations: bool = False
    """Keep what layers save for backward in host memory until backward needs it, so that a rank holds the activations
    of two layers. With trainer.recompute.granularity=full these are their inputs only."""
    optimizer: bool = False
    """Keep master weights and moments in host memory, except during a step. Costs two copies of them per step."""


class OffloadLaunch(LaunchHooks):
    """What the estimates of memory need to know."""

    def __init__(self, settings: OffloadSettings) -> None:
        self._settings = settings

    def memory(self, config: Config) -> dict[str, int]:
        """Return two layers, the one that runs and the one whose activations move, and whether the optimizer's states
        are on the device during a step alone."""
        layers = {"layers_held": 2} if self._settings.activations else {}
        return {**layers, "states_away": int(self._settings.optimizer)}


class OffloadTrainer(TrainerHooks):
    """Moves the activations of every network of a rank, and the states of their optimizers."""

    def __init__(self, settings: OffloadSettings, policy: Policy) -> None:
        self.offloads: list[ActivationOffload] = []
        if settings.optimizer:
            self._move_states(policy)
        if settings.activations:
            self._move_activations(policy)

    def _move_states(self, policy: Policy) -> None:
        from asyncrl.extensions.offload.device_memory import MovedStates

        for network, optimizer in ((policy.network, policy.optimizer), *policy.others.values()):
            optimizer.memory = MovedStates(network, optimizer)

    def _move_activations(self, policy: Policy) -> None:
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
        """Return what moves activations and states, if they are asked for."""
        return OffloadTrainer(self.settings, policy)


Own = Offload
