"""The GPUs of engines, by name, for the extensions that do not run on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.config import Config
from asyncrl.extension import active
from asyncrl.launch.placement import Node, Seat
from asyncrl.launch.preflight.facts import MachineFacts


def check_generations(
    config: Config, seats: Iterable[Seat], nodes: Sequence[Node], machines: Sequence[MachineFacts]
) -> None:
    """Refuse settings with which an engine dies at its start, or at its second version, on the GPUs of its seats.
    `machines` has what is known of `nodes`, in their order. Raises ConfigError."""
    known = {node.name: machine for node, machine in zip(nodes, machines, strict=False)}
    placed = [(known[seat.node.name], seat.visible.split(",")) for seat in seats if seat.node.name in known]
    for gpu in sorted({one.name for machine, visible in placed for one in machine.visible(visible)}):
        for extension in active(config).values():
            for problem in extension.launch().check_gpu(config, gpu):
                raise problem
