"""Engines that join a run get machines of their own."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.join.command import place_engines
from asyncrl.launch.placement import Seat, imagined
from tests.fakes import JOB, tiny_config


def where(seats: list[Seat]) -> list[tuple[str, tuple[int, ...]]]:
    return [(seat.node.name, seat.gpus) for seat in seats]


def test_further_engines_fill_machines_of_their_own() -> None:
    def further(nodes: int, gpus: int, count: int | None = None, **changes: Any) -> list[list[tuple[str, Any]]]:
        config = tiny_config(**JOB, **changes)
        wide = tiny_config(**JOB, **{"engine.count": 8})  # for its ports
        return [where(seats) for seats in place_engines(config, imagined(wide, nodes, gpus), count)]

    assert further(2, 2) == [[("node0", (0,))], [("node0", (1,))], [("node1", (0,))], [("node1", (1,))]]
    assert further(1, 4, **{"engine.tensor_parallel": 2}) == [[("node0", (0, 1))], [("node0", (2, 3))]]
    assert further(2, 2, **{"engine.tensor_parallel": 4}) == [[("node0", (0, 1)), ("node1", (0, 1))]]
    assert further(2, 0) == [[("node0", ())], [("node1", ())]]
    assert further(2, 2, 1) == [[("node0", (0,))]]
    with pytest.raises(ConfigError, match=r"engine.count"):
        further(1, 2, 3)
