"""The parts of the rollout side that are put together from the settings."""

from __future__ import annotations

import pytest

from asyncrl.models import catalog
from asyncrl.models.tiny import TOKENS
from asyncrl.network.addresses import Addresses
from asyncrl.rollout.parts import ModelParts, _client
from tests.fakes import tiny_config


@pytest.mark.parametrize(
    ("engines", "attached", "shape", "several"),
    [
        (1, 0, {}, False),
        (2, 0, {}, True),
        (1, 1, {}, True),
        (1, 0, {"tensor_parallel": 2, "data_parallel": 2}, True),
    ],
)
def test_siblings_are_spread_where_there_are_several_engines_or_replicas(
    engines: int, attached: int, shape: dict[str, int], several: bool
) -> None:
    config = tiny_config(
        **{"rollout.spread_siblings": True}, **{f"engine.{name}": size for name, size in shape.items()}
    )
    urls = tuple(f"http://engine-{number}" for number in range(engines + attached))
    addresses = Addresses(
        *("run", "key", catalog.resolve("builtin:tiny"), urls[:engines], "http://router", "http://rollout"),
        gpus=0,
        started_at=0.0,
        attached=urls[engines:],
    )
    client = _client(config, addresses, ModelParts.load(config, addresses), "")
    assert client._spread(1) is several
    assert client._vocabulary == len(TOKENS)
