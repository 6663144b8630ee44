"""A trainer's sending half without Megatron: weights that are a function of the version, published to real engines.

As a program, a trainer that can be killed at any instant: python -m tests.integration.publisher JSON, where JSON names
model, engines, router, key, first version, folder and weights settings. Prints each published version.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from asyncrl import lookup
from asyncrl.config import Config
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.router import RouterWorkers
from asyncrl.engine.update import Update
from asyncrl.models.architectures import flat
from asyncrl.network.addresses import Addresses
from asyncrl.parallel import Parallel
from asyncrl.weights.checksum import ExpectedChecksums
from asyncrl.weights.layouts import Pieces
from asyncrl.weights.publish import Outgoing, Publisher
from asyncrl.weights.transports import build_transport

DEGREES = ("tp", "pp", "cp", "dp", "etp", "ep")
ALONE: dict[str, Any] = {
    **dict.fromkeys(DEGREES, 1),
    **{f"{degree}_rank": 0 for degree in (*DEGREES, "edp")},
    "rank": 0,
    "device": torch.device("cpu"),
    "tp_group": None,
    "expert_group": None,
}


@dataclass
class FakeRollout:
    """What hears of a publish in place of the rollout process."""

    hold: Callable[[], None] = lambda: None
    announce: Callable[[int], object] = lambda version: None


class SeededWeights:
    """Replacement of a Resharder: the model's weights with noise that depends only on the version."""

    checksums = ExpectedChecksums

    def __init__(self, model: Path, share: float = 1.0, device: str = "cpu") -> None:
        files = sorted(model.glob("*.safetensors"))
        self._base = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self._share, self._device = share, device
        self.version = 0

    def described(self) -> Iterator[tuple[str, torch.dtype, torch.Size]]:
        for name, tensor in self._base.items():
            yield name, tensor.dtype, tensor.shape

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        draw = torch.Generator().manual_seed(self.version)
        for name, tensor in self._base.items():
            if self.version == 0:
                yield name, tensor.to(self._device)
                continue
            noise = 0.05 * torch.randn(tensor.shape, generator=draw)
            noise *= torch.rand(tensor.shape, generator=draw) < self._share
            yield name, (tensor.float() + noise).to(tensor.dtype).to(self._device)

    def stream(self, *, merged: bool = True) -> Iterator[tuple[str, Pieces]]:
        return ((name, Pieces([tensor])) for name, tensor in self.hf_tensors())

    def figures(self) -> dict[str, float]:
        return {}

    def at(self, version: int) -> dict[str, Tensor]:
        """Return all tensors of a version."""
        held, self.version = self.version, version
        tensors = dict(self.hf_tensors())
        self.version = held
        return tensors


def quantized(weights: SeededWeights, hf: dict[str, Any], kind: Any, wide: torch.dtype) -> Any:
    """Return what a publisher sends to quantized engines."""
    from asyncrl.extensions.quantized.codes import QuantizedWeights

    return QuantizedWeights(weights, hf["architectures"][0], kind, wide)


class Sender(Publisher):
    """A publisher with its engines and weights, and with what it calls before and after a publish, which may change."""

    def __init__(self, *parts: Any, hold: Callable[[], object], announce: Callable[[int], object], **more: Any) -> None:
        _, update, _, outgoing, _ = parts
        self.fleet = update.fleet
        self.weights = outgoing.weights
        self.hold = hold
        self.announce = announce
        super().__init__(*parts, rollout=self, **more)  # type: ignore[arg-type]


def make(
    config: Config,
    addresses: Addresses,
    weights: SeededWeights,
    folder: Path,
    *,
    urls: tuple[str, ...] | None = None,
    hold: Callable[[], object] = lambda: None,
    announce: Callable[[int], object] = lambda version: None,
    device: str = "cpu",
) -> Sender:
    """Return a publisher of one rank, created as in trainer/publishers.py. `device` is the trainer's."""
    for group, name in list(c10d._world.pg_names.items()):
        if name == "asyncrl-stage0":  # of the test before: a trainer has one publisher
            dist.destroy_process_group(group)
    timeout = config.weights.timeout
    fleet = Fleet(
        urls or addresses.engines,
        addresses.access,
        timeout,
        router=RouterWorkers(addresses.router, addresses.access, timeout),
    )
    transport, _ = build_transport(
        config, fleet, host=config.cluster.host or "", alone=True, stage=0, gpu=device != "cpu", folder=folder
    )
    parallel = Parallel(**{**ALONE, "device": torch.device(device)})
    hf = flat(json.loads((addresses.model / "config.json").read_text()))
    sent: Any = weights
    for one in lookup.active(config).values():
        sent = one.trainer(SimpleNamespace(config=config, hf=hf)).sent(sent)  # type: ignore[arg-type]

    def expected() -> ExpectedChecksums:
        found: ExpectedChecksums = sent.checksums(
            hf,
            config.engine.parallel,
            dtype=getattr(torch, config.engine.dtype),
            device="cuda" if addresses.gpus else "cpu",
        )
        return found

    return Sender(
        parallel,
        Update(fleet, mode=config.weights.pause_mode),
        transport,
        Outgoing(sent, expected),
        config.weights,
        hold=hold,
        announce=announce,
    )


def publish(publisher: Sender, version: int) -> dict[str, float]:
    """Set the weights to a version and publish it."""
    weights: Any = publisher.weights
    getattr(weights, "_weights", weights).version = version
    return publisher.publish(version)


def main(order: dict[str, Any]) -> None:
    config = Config.model_validate(order["config"])
    addresses = Addresses.read(Path(order["run_dir"]))
    publisher = make(
        config, addresses, SeededWeights(addresses.model), Path(order["folder"]), urls=tuple(order["serving"])
    )
    for url in order["joining"]:
        publisher.fleet.join(url)
    for version in range(order["first"], order["last"] + 1):
        print(f"publishing {version}", flush=True)
        publish(publisher, version)
        print(f"published {version} to {len(publisher.fleet.serving)}", flush=True)
        time.sleep(order["pause"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
