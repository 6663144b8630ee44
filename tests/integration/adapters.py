"""A trainer's publisher of adapters without Megatron: adapters that are a function of the version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncrl.config import Config
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.router import RouterWorkers
from asyncrl.engine.served import InUse
from asyncrl.extensions.lora.publish import AdapterPublisher, PastAdapters, build_adapters
from asyncrl.extensions.lora.rules import LINEARS
from asyncrl.extensions.lora.served import adapter_names, no_past
from asyncrl.network.addresses import Addresses
from asyncrl.parallel import Parallel
from asyncrl.schema import POLICY
from tests.integration.fleet import Engines
from tests.integration.publisher import ALONE

RANK = 4
SETTINGS = (f"trainer.lora.rank={RANK}", "trainer.lora.alpha=8", "weights.lora=versions", "rollout.max_staleness=2")

NO_PAST = PastAdapters(Path("/nowhere"), None, no_past, list, lambda tensors: {})


class SeededAdapters:
    """Replacement of a Resharder's adapters: numbers that depend only on the version and a seed."""

    def __init__(self, fleet: Engines, targets: Sequence[str] = LINEARS, *, seed: int = 0, size: float = 0.3) -> None:
        files = sorted(fleet.addresses.model.glob("*.safetensors"))
        self.base = {name: tensor for file in files for name, tensor in load_file(file).items()}
        weights = {name: tensor for name, tensor in self.base.items() if name.endswith("_proj.weight")}
        self._linears = {n: t for n, t in weights.items() if n.split(".")[-2] in targets and "visual." not in n}
        self._seed, self._size = seed, size
        self._rank, self.version = fleet.config.trainer.lora.rank or RANK, 0

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        draw = torch.Generator().manual_seed(self._seed + self.version)
        for name, weight in self._linears.items():
            stem = name.removesuffix(".weight")
            yield f"{stem}.lora_A.weight", self._size * torch.randn(self._rank, weight.shape[1], generator=draw)
            yield f"{stem}.lora_B.weight", self._size * torch.randn(weight.shape[0], self._rank, generator=draw)

    def merged(self, version: int, scale: float) -> dict[str, Tensor]:
        """Return the weights of a version, with the adapter added."""
        held, self.version = self.version, version
        adapter = dict(self.adapters()) if version else {}
        self.version = held
        merged = {name: tensor.float() for name, tensor in self.base.items()}
        for name in self._linears if adapter else ():
            stem = name.removesuffix(".weight")
            merged[name] = merged[name] + scale * adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
        return merged


def in_dtype(weights: SeededAdapters, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter as the engines get it."""
    return ((name, tensor.to(getattr(torch, dtype))) for name, tensor in weights.adapters())


@contextmanager
def publisher_of(
    config: Config,
    addresses: Addresses,
    weights: SeededAdapters,
    folder: Path,
    *,
    run: str,
    announce: Callable[[int], InUse] = lambda version: InUse(),
    tidy: bool = True,
    others: Mapping[str, SeededAdapters] = MappingProxyType({}),
) -> Iterator[AdapterPublisher]:
    """Yield a publisher of one rank, created as in trainer/__main__.py; its adapters are unloaded in the end. `others`
    are adapters beside that of the policy, by name."""
    router = RouterWorkers(addresses.router, addresses.access, config.weights.timeout)
    fleet = Fleet(addresses.engines, addresses.access, config.weights.timeout, router=router)
    build, _ = build_adapters(config, fleet, host=config.cluster.host or "", folder=folder)
    names = adapter_names(config, run)
    assert names
    made = AdapterPublisher(
        Parallel(**ALONE),
        fleet,
        {name: partial(in_dtype, one, config.engine.dtype) for name, one in {POLICY: weights, **others}.items()},
        build,
        config.weights,
        names=names,
        announce=announce,
        past=NO_PAST,
    )
    try:
        yield made
    finally:
        for adapter in made._live.values() if tidy else ():
            fleet.call("/unload_lora_adapter", {"lora_name": adapter.name})
        fleet.close()
        router._http.close()


def publish(publisher: AdapterPublisher, weights: SeededAdapters, version: int) -> dict[str, float]:
    """Set the adapter to a version and publish it."""
    weights.version = version
    return publisher.publish(version)
