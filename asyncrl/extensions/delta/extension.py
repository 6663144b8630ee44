"""What this folder adds: a transport of new weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncrl.errors import ConfigError
from asyncrl.extension import Extension, OfferedTransport

if TYPE_CHECKING:
    from asyncrl.config import Config


class Delta(Extension):
    """weights.transport=delta."""

    transports = {  # noqa: RUF012
        "delta": OfferedTransport(
            "asyncrl.extensions.delta.transport:DeltaTransport",
            by_file=True,
            loader="asyncrl.extensions.delta.loader.load",
        )
    }

    def check(self, config: Config) -> Iterator[ConfigError]:
        """Refuse runs in which a delta would have nothing that it applies to."""
        transport = config.weights.transport
        if transport not in self.transports:
            return
        if config.weights.overlap:
            remedy = (
                "Engines may ask for all weights, which the trainer has changed by then (weights.overlap): set "
                "another, or set weights.overlap=false."
            )
            yield ConfigError("weights.transport", transport, remedy)
        if config.cluster.placement == "colocated":
            remedy = (
                "With cluster.placement=colocated an engine's weights are undefined after a release, so that no delta "
                "applies to them: set auto, tensor or disk."
            )
            yield ConfigError("weights.transport", transport, remedy)


Own = Delta
