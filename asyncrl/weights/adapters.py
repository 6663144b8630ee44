"""Publication of a version as an adapter of its own (weights.lora=versions), while the engines generate.

    gather     the adapter comes from the first ranks of the pipeline stages to rank 0
    load       every engine loads it beside the older ones, between two steps of its scheduler; engines that were
               restarted or joined load all that are in use
    label      every engine confirms the version, and the router sends requests to engines that joined
    announce   new completions of the rollout side use it, and it says which older ones are still in use
    unload     the others

Nothing pauses, and no cache is flushed. An adapter is loaded everywhere before a request may name it, and is unloaded
only when none can name it any more: SGLang would wait for its requests, and block other adapters meanwhile.

    waits for     the engines (weights.timeout per call), the other stages (the process group's timeout)
    on failure    an engine that fails is lost and the others continue (engine/fleet.py)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.config import Config, WeightsConfig
from asyncrl.config.adapters import adapter_targets
from asyncrl.config.lora import LoraConfig
from asyncrl.engine.adapters import AdapterName
from asyncrl.engine.fleet import Answer, Fleet
from asyncrl.engine.update import Update
from asyncrl.errors import WeightsError
from asyncrl.parallel import Parallel
from asyncrl.weights.bucket import fill, nbytes, plan_buckets, views
from asyncrl.weights.choice import choose
from asyncrl.weights.layouts import Pieces
from asyncrl.weights.tensor import handle, shared_memory

Tensors = dict[str, Tensor]
WEIGHTS = "adapter_model.safetensors"


def adapter_config(lora: LoraConfig) -> dict[str, Any]:
    """Return PEFT's configuration of the adapters, as SGLang reads it: it scales by lora_alpha / r whatever use_rslora
    says."""
    assert lora.rank is not None, "trainer.lora.rank is unset"
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": adapter_targets(lora),
        "bias": "none",
    }


class PublishedAdapter(ABC):
    """An adapter that engines can load until it is dropped."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name, self._config = name, config

    @abstractmethod
    def load(self, *, verify: bool) -> tuple[str, Answer]:
        """Return the path and the body of one engine's request. With `verify` the engine compares checksums."""

    @abstractmethod
    def check(self, tensors: Tensors) -> None:
        """Raise WeightsError unless exactly these tensors would be loaded."""

    @abstractmethod
    def drop(self) -> None:
        """Free its memory or files: no engine will load it again."""


class SharedAdapter(PublishedAdapter):
    """An adapter in shared memory, for engines on this host. They keep views of it, so it is never written again."""

    def __init__(self, name: str, config: dict[str, Any], tensors: Tensors, engine_tp: int) -> None:
        super().__init__(name, config)
        self._engine_tp = engine_tp
        (self._bucket,) = plan_buckets(((n, t.dtype, t.shape) for n, t in tensors.items()), 1 << 62)
        self._flat = shared_memory(nbytes(self._bucket))
        fill(self._flat, self._bucket, ((n, Pieces([t])) for n, t in tensors.items()))

    def load(self, *, verify: bool) -> tuple[str, Answer]:
        """Return a request with a handle for each of the engine's ranks, all of the whole adapter: the engine cuts
        it."""
        return "/load_lora_adapter_from_tensors", {
            "lora_name": self.name,
            "config_dict": self._config,
            "serialized_named_tensors": [handle(self._flat, self._bucket) for _ in range(self._engine_tp)],
            "load_format": "flattened_bucket",
            "expected_checksums": checksums(views(self._flat, self._bucket)) if verify else None,
        }

    def check(self, tensors: Tensors) -> None:
        """Compare the shared memory with the tensors. An engine that finds a wrong checksum ends with an error, so that
        a mistake here would end all of them."""
        _compare(self.name, tensors, views(self._flat, self._bucket))

    def drop(self) -> None:
        """Release the memory, which engines that still map it keep."""
        del self._flat


class AdapterFolder(PublishedAdapter):
    """An adapter as a PEFT folder on a file system that the engines share."""

    def __init__(self, name: str, config: dict[str, Any], tensors: Tensors, root: Path) -> None:
        super().__init__(name, config)
        self._folder = root / name
        save_peft(self._folder, tensors, config)

    def load(self, *, verify: bool) -> tuple[str, Answer]:
        """Return a request with the folder, whose checksums only the sender can compare."""
        return "/load_lora_adapter", {"lora_name": self.name, "lora_path": str(self._folder)}

    def check(self, tensors: Tensors) -> None:
        """Read the file back and compare."""
        _compare(
            self.name,
            tensors,
            {n.removeprefix("base_model.model."): t for n, t in load_file(self._folder / WEIGHTS).items()},
        )

    def drop(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


class AdapterPublisher:
    """The publisher of one trainer rank. Only rank 0 holds adapters and controls the engines."""

    def __init__(
        self,
        parallel: Parallel,
        fleet: Fleet,
        adapter: Callable[[], Iterator[tuple[str, Tensor]]],
        make: Callable[[str, Tensors], PublishedAdapter],
        settings: WeightsConfig,
        dtype: torch.dtype,
        *,
        names: AdapterName,
        announce: Callable[[int], list[int]],
    ) -> None:
        """`adapter` yields the tensors of this stage on exporting ranks; every rank iterates over it. `make` keeps them
        under a name, in `dtype`, that of the engines. `announce` returns the versions that are in use."""
        self._parallel, self._fleet, self._settings, self._dtype = parallel, fleet, settings, dtype
        self._adapter, self._make, self._names, self._announce = adapter, make, names, announce
        self._update = Update(fleet, mode="in_place")
        self._live: dict[int, PublishedAdapter] = {}
        self._newest: int | None = None
        self._verified_once = False

    @torch.no_grad()
    def publish(self, version: int) -> dict[str, float]:
        """Publish a version; runs on every rank. Returns the seconds of gathering, and on rank 0 the bytes of the
        adapter and the numbers of adapters and of engines that serve. A version that was published before is loaded
        only by engines that joined."""
        started = time.monotonic()
        name = self._names(version)
        tensors = self._gathered() if name and version != self._newest else {}
        self._newest = version
        filled = time.monotonic()
        if self._parallel.is_first:
            self._fleet.reconcile()
            verify = self._verification_is_due(version)
            if name and tensors:
                self._live[version] = self._make(name, tensors)
                if verify:
                    self._live[version].check(tensors)
            self._fleet.on_each(lambda url: self._load(url, [version] if tensors else [], verify=verify))
            self._update.label(version)
            self._fleet.admit()
            self._unload(self._announce(version))
        return {
            "fill": filled - started,
            "pause": 0.0,
            "verify": 0.0,
            "bytes": float(sum(tensor.nbytes for tensor in tensors.values())),
            "engines": float(len(self._fleet.serving)),
        }

    def _gathered(self) -> Tensors:
        """Return the whole adapter on rank 0, and nothing elsewhere."""
        mine = {name: tensor.to("cpu", self._dtype) for name, tensor in self._adapter()}
        if self._parallel.pp == 1:
            return mine if self._parallel.is_first else {}
        stages: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, stages if self._parallel.is_first else None)
        return {name: tensor for stage in stages if stage for name, tensor in stage.items()}

    def _load(self, url: str, new: list[int], *, verify: bool) -> Answer:
        """Load the new adapter into an engine; into one that joined, all of them."""
        joins = url in self._fleet.joining
        if joins:
            self._clear(url)
        for version in sorted(self._live) if joins else new:
            path, body = self._live[version].load(verify=verify)
            self._fleet.post(url, path, body)
        return {}

    def _clear(self, url: str) -> None:
        """Unload what an engine that somebody else started holds: adapters of an earlier start of the run, or of a
        publish that it did not survive."""
        for card in self._fleet.get(url, "/v1/models").get("data", []):
            if card.get("parent"):
                self._fleet.post(url, "/unload_lora_adapter", {"lora_name": card["id"]})

    def _unload(self, used: list[int]) -> None:
        """Unload and drop all adapters but the newest and those in use."""
        for version in [version for version in self._live if version not in (*used, self._newest)]:
            adapter = self._live.pop(version)
            self._fleet.call("/unload_lora_adapter", {"lora_name": adapter.name})
            adapter.drop()

    def _verification_is_due(self, version: int) -> bool:
        every, first = self._settings.verify_every, not self._verified_once
        self._verified_once = True
        due = first or self._fleet.joining or (every and version % every == 0)
        return bool(self._settings.verify and due)


def save_peft(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write a PEFT folder, which gets its name only when it is complete."""
    building = folder.with_name(folder.name + ".partial")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, building / WEIGHTS)
    (building / "adapter_config.json").write_text(json.dumps(config))
    os.rename(building, folder)


def checksums(tensors: Tensors) -> dict[str, str]:
    """Return SHA-256 of every tensor's bytes, as SGLang computes it."""
    return {
        name: hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, t in tensors.items()
    }


def _compare(name: str, given: Tensors, held: Tensors) -> None:
    wanted, found = checksums(given), checksums(held)
    if wrong := sorted(tensor for tensor in wanted.keys() | found.keys() if wanted.get(tensor) != found.get(tensor)):
        raise WeightsError(f"the adapter {name} is not what was trained (weights.verify): {', '.join(wrong[:8])}")


def build_adapters(
    config: Config, fleet: Fleet, *, host: str, folder: Path
) -> tuple[Callable[[str, Tensors], PublishedAdapter], str]:
    """Return how adapters are kept for the engines, and the reason. `host` is rank 0's address, `folder` the one that
    all engines see."""
    peft = adapter_config(config.trainer.lora)
    carried, why = choose(config.weights.transport, list(fleet.urls), host, gpu=False)

    if carried == "tensor":
        tp = config.engine.tensor_parallel
        return lambda name, tensors: SharedAdapter(name, peft, tensors, tp), f"adapters in shared memory ({why})"
    return lambda name, tensors: AdapterFolder(name, peft, tensors, folder), f"adapters in {folder} ({why})"
