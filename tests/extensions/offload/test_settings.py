"""What the estimates of memory and the network know of activations in host memory."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl import lookup
from asyncrl.errors import ConfigError
from tests.fakes import tiny_config


def test_a_gpu_holds_the_activations_of_two_layers() -> None:
    training_of = pytest.importorskip("asyncrl.extensions.plan.settings").training_of
    with_offload, without = (tiny_config(**{"offload.activations": on}) for on in (True, False))
    assert [training_of(with_offload, gpu=gpu).layers_held for gpu in (True, False)] == [2, float("inf")]
    assert training_of(without, gpu=True).layers_held == float("inf")


def test_the_old_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"set offload\.activations"):
        tiny_config(**{"trainer.activation_offload": True})


def test_every_network_and_layer_is_offloaded() -> None:
    own = lookup.active(tiny_config(**{"offload.activations": True}))["offload"]
    networks = [network(layers) for layers in (2, 3)]
    hooks: Any = own.trainer(SimpleNamespace(networks=lambda: networks))  # type: ignore[arg-type]
    assert [offload.micro_batch for offload in hooks.offloads] == [one.around_forward[-1] for one in networks]
    hooked = [[len(layer._forward_pre_hooks) for layer in one.chunks[0].decoder.layers] for one in networks]
    assert hooked == [[1, 1], [1, 1, 1]]


def network(layers: int) -> Any:
    made = [torch.nn.Identity() for _ in range(layers)]
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=made))
    return SimpleNamespace(around_forward=[nullcontext], chunks=[chunk])
