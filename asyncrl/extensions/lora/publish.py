"""Publication of a version as adapters of its own (weights.lora=versions), while the engines generate: one, or one for
each name in Config.adapters, all of which are in use or not together.

    gather     the adapters come from the first ranks of the pipeline stages to rank 0
    load       every engine loads it beside the older ones, between two steps of its scheduler; engines that were
               restarted or joined load all that are in use
    label      every engine confirms the version, and the router sends requests to engines that joined
    announce   new completions of the rollout side use it, and it says which older ones are still in use
    unload     the others

Trainers that start again find the earlier versions in the engines, and a later one that was never announced.

Nothing pauses, and no cache is flushed. An adapter is loaded everywhere before a request may name it, and is unloaded
only when none can name it any more: SGLang would wait for its requests, and block other adapters meanwhile.

    waits for     the engines (weights.timeout per call), the other stages (the process group's timeout)
    on failure    an engine that fails is lost and the others continue (engine/fleet.py)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncrl import lookup
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.config import Config, WeightsConfig
from asyncrl.config.lora import LoraConfig
from asyncrl.engine.calls import Answer
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.served import InUse
from asyncrl.engine.update import RolloutSide, Update
from asyncrl.errors import AsyncRLError, WeightsError
from asyncrl.extensions.lora.peft import read_peft, write_peft
from asyncrl.extensions.lora.peft_config import parsed, user_config
from asyncrl.extensions.lora.rules import past_versions
from asyncrl.extensions.lora.served import AdapterName, adapter_names
from asyncrl.extensions.lora.weights import AdapterWeights
from asyncrl.parallel import Parallel, from_first
from asyncrl.weights.bucket import fill, nbytes, plan_buckets, views
from asyncrl.weights.choice import choose
from asyncrl.weights.export import gathered
from asyncrl.weights.layouts import Pieces
from asyncrl.weights.publish import Staged, StagedPublisher, VersionPublisher, verifies
from asyncrl.weights.transport import handle, shared_memory
from asyncrl.weights.transports import claim

if TYPE_CHECKING:
    from asyncrl.trainer.publishers import Publishing

NAME = "lora"
"""Name of the extension."""
Tensors = dict[str, Tensor]
PAST = "past"
"""Folder of a run with past versions of adapters."""


def engine_config(lora: LoraConfig, tensors: Iterable[str]) -> dict[str, Any]:
    """Return PEFT's configuration of the adapters for SGLang, which scales by lora_alpha / r whatever use_rslora
    says."""
    assert lora.rank is not None, "trainer.lora.rank is unset"
    targets = sorted({parsed(name)[0].rpartition(".")[2] for name in tensors})
    return {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": targets,
        "bias": "none",
    }


class SharedAdapter:
    """An adapter in shared memory, for engines on this host. They keep views of it, so it is never written again."""

    loadable = True
    """Whether engines that do not hold it can have it."""

    def __init__(self, name: str, config: dict[str, Any], tensors: Tensors, ranks: int) -> None:
        self.name = name
        self._config = config
        self._ranks = ranks
        (self._bucket,) = plan_buckets(((n, t.dtype, t.shape) for n, t in tensors.items()), 1 << 62)
        self._flat = shared_memory(nbytes(self._bucket))
        fill(self._flat, self._bucket, ((n, Pieces([t])) for n, t in tensors.items()))

    def load(self, *, verify: bool) -> tuple[str, Answer]:
        """Return the path and the body of one engine's request, with a handle for each of its ranks, all of the whole
        adapter: the engine cuts it. With `verify` the engine compares checksums."""
        return "/load_lora_adapter_from_tensors", {
            "lora_name": self.name,
            "config_dict": self._config,
            "serialized_named_tensors": [handle(self._flat, self._bucket) for _ in range(self._ranks)],
            "load_format": "flattened_bucket",
            "expected_checksums": checksums(self.held()) if verify else None,
        }

    def held(self) -> Tensors:
        """Return the tensors that are in the memory."""
        return views(self._flat, self._bucket)

    def drop(self) -> None:
        """Release the memory, which engines that still map it keep: no engine will load it again."""
        del self._flat


class AdapterFolder:
    """An adapter as a PEFT folder on a file system that the engines share."""

    def __init__(
        self, name: str, root: Path, config: dict[str, Any] | None = None, tensors: Tensors | None = None
    ) -> None:
        """Write the folder. Without tensors, trainers that died may have done so; what they had in shared memory is in
        the engines alone."""
        self.name = name
        self._folder = root / name
        if config is not None and tensors is not None:
            claim(root)
            write_peft(self._folder, config, tensors.items())

    @property
    def loadable(self) -> bool:
        """Return whether engines that do not hold it can have it."""
        return self._folder.exists()

    def load(self, *, verify: bool) -> tuple[str, Answer]:
        """Return a request with the folder, whose checksums only the sender can compare."""
        return "/load_lora_adapter", {"lora_name": self.name, "lora_path": str(self._folder)}

    def held(self) -> Tensors:
        """Return the tensors that are in the file."""
        return read_peft(self._folder)

    def drop(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


PublishedAdapter = SharedAdapter | AdapterFolder
"""An adapter that engines can load until it is dropped."""


class PastAdapters:
    """Past versions of adapters that play roles (agents.roles.NAME.past), as PEFT folders RUN/past/ADAPTER/v000012.
    Rank 0 has them.

    A folder holds what the engines got when its version was published. It stays as long as the newest version or a
    checkpoint needs it: a run that resumes there loads it into the engines again.
    """

    def __init__(
        self,
        run_dir: Path,
        origin: Path | None,
        needed: Callable[[int], dict[str, list[int]]],
        checkpoints: Callable[[], list[int]],
        describe: Callable[[Tensors], dict[str, Any]],
    ) -> None:
        """`origin` is the folder of the run whose checkpoint is resumed. `needed` returns the past versions of each
        adapter that may play while a version is the newest, `checkpoints` the versions of all checkpoints, and
        `describe` the adapter_config.json of an adapter."""
        self._run_dir = run_dir
        self._origin = origin
        self.needed = needed
        self._checkpoints = checkpoints
        self._describe = describe

    def write(self, version: int, adapter: str, tensors: Tensors) -> None:
        """Write a version that is published, if it will play a role. Raises WeightsError if the disk cannot take it."""
        if version in self.needed(version).get(adapter, ()):
            self._write(_past(self._run_dir, adapter, version), tensors)

    def read(self, version: int, adapter: str) -> Tensors:
        """Read a version that was published earlier, from the run that is resumed if this one has a new folder. Raises
        WeightsError if it is missing."""
        folder = _past(self._run_dir, adapter, version)
        source = _past(self._origin, adapter, version) if self._origin and not folder.exists() else folder
        try:
            tensors = read_peft(source)
        except AsyncRLError as error:
            raise WeightsError(
                f"A past version of {adapter} that plays a role (agents.roles) cannot be read: {error} Copy the folder "
                f"{PAST} of the run that is resumed, or remove that role."
            ) from None
        if source != folder:
            self._write(folder, tensors)
        return tensors

    def _write(self, folder: Path, tensors: Tensors) -> None:
        write_peft(folder, self._describe(tensors), tensors.items())

    def prune(self, newest: int) -> None:
        """Delete the versions that neither the newest version nor a checkpoint needs."""
        needed = [self.needed(version) for version in {newest, *self._checkpoints()}]
        for folder in (self._run_dir / PAST).glob(f"*/v{'[0-9]' * 6}"):
            adapter, version = folder.parent.name, int(folder.name[1:])
            if not any(version in one.get(adapter, ()) for one in needed):
                shutil.rmtree(folder, ignore_errors=True)


def _past(run_dir: Path, adapter: str, version: int) -> Path:
    return run_dir / PAST / adapter / f"v{version:06d}"


@dataclass(frozen=True)
class StagedAdapters(Staged):
    """What the rest of a publish needs: also the adapters of the version, by name."""

    adapters: dict[str, Tensors] = field(default_factory=dict)


class AdapterPublisher(StagedPublisher):
    """The publisher of one trainer rank. Only rank 0 holds adapters and controls the engines."""

    def __init__(
        self,
        parallel: Parallel,
        fleet: Fleet,
        adapters: dict[str, Callable[[], Iterator[tuple[str, Tensor]]]],
        make: Callable[[str, Tensors | None], PublishedAdapter],
        settings: WeightsConfig,
        *,
        names: AdapterName,
        announce: Callable[[int], InUse],
        past: PastAdapters,
        base: Callable[[Update], VersionPublisher] | None = None,
    ) -> None:
        """`adapters` yield, by name, the tensors of this stage on exporting ranks, as the engines get them; every rank
        iterates over them. `make` keeps them under a name; without tensors trainers that died have done so. `announce`
        returns what is in use. `past` is for past versions that play roles. `base` makes the publisher of the base for
        engines that do not load it from the model folder."""
        self._parallel = parallel
        self._fleet = fleet
        self._adapters = adapters
        self._make = make
        self._settings = settings
        self._names = names
        self._announce = announce
        self._past = past
        # no engine has a version's label, or requests, without its adapters
        self._update = Update(fleet, mode="in_place", before_label=self._load)
        self._base = base(self._update) if base else None
        self._sent = False  # whether the base was
        self._live: dict[tuple[int, str], PublishedAdapter] = {}
        self._newest: int | None = None
        self._verified_once = False
        self._verify = False

    @torch.no_grad()
    def stage(self, version: int) -> Staged:
        """Gather a version of every adapter on rank 0; runs on every rank. One that was published before is loaded only
        by engines that joined."""
        started = time.monotonic()
        tensors = {
            name: gathered(read(), self._parallel)
            for name, read in self._adapters.items()
            if version != self._newest and self._names(version, name)
        }
        metrics = {
            "fill": time.monotonic() - started,
            "pause": 0.0,
            "bytes": float(sum(tensor.nbytes for given in tensors.values() for tensor in given.values())),
        }
        return StagedAdapters(version, metrics, adapters=tensors)

    @torch.no_grad()
    def complete(self, staged: Staged) -> dict[str, float]:
        """Let every engine load and serve a version; runs on every rank. Returns also the seconds of verifying, and the
        numbers of engines that serve and of adapters that they hold meanwhile."""
        assert isinstance(staged, StagedAdapters)
        version, first = staged.version, self._newest is None
        self._newest = version
        verified, held = 0.0, 0
        if self._parallel.is_first:
            self._fleet.reconcile()
            unproven = not self._verified_once or bool(self._fleet.joining)
            self._verify = verifies(self._settings, version, unproven=unproven)
            if first:
                self._reload(version)
                self._inherit(version)
            verified = sum(self._keep(version, name, given) for name, given in staged.adapters.items())
        if self._base and from_first(bool(self._fleet.joining) or not self._sent):
            self._base.publish(version)
            self._sent = True
        elif self._parallel.is_first:
            self._update.label(version)
            # an engine that failed a call was paused when it left the fleet
            self._fleet.on_each(lambda url: self._fleet.post(url, "/continue_generation"), list(self._fleet.joining))
            self._fleet.admit()
        if self._parallel.is_first:
            held = len(self._live)
            self._unload(self._announce(version))
            self._past.prune(version)
        return {
            **staged.metrics,
            "verify": verified,
            "engines": float(len(self._fleet.serving)),
            "adapters/resident": float(held),
        }

    def _keep(self, version: int, adapter: str, tensors: Tensors) -> float:
        """Keep a version of an adapter for the engines, and in the run folder if it will play a role later. Returns the
        seconds of comparing it with the tensors."""
        name = self._names(version, adapter)
        assert name is not None
        live = self._live[version, adapter] = self._make(name, tensors)
        if version == self._newest:
            self._past.write(version, adapter, tensors)
        started = time.monotonic()
        if self._verify:
            # an engine that finds a wrong checksum ends with an error, so that a mistake here would end all of them
            _compare(name, tensors, live.held())
            self._verified_once = True
        return time.monotonic() - started

    def _reload(self, version: int) -> None:
        """Keep the past versions that play roles in a run that resumes at this version."""
        for adapter, versions in self._past.needed(version).items():
            for old in versions:
                if old < version and self._names(old, adapter):
                    self._keep(old, adapter, self._past.read(old, adapter))

    def _inherit(self, version: int) -> None:
        """Take over what trainers of this run that died have left in the engines: earlier versions, which may be in
        use, and a later one that was never announced. It is unloaded, because the next one gets its name."""
        known = {self._names(old, adapter): (old, adapter) for old in range(version + 2) for adapter in self._adapters}
        left = set[str]().union(*self._fleet.on_each(self._held, list(self._fleet.serving)).values()) & known.keys()
        later = {name for name in left if known[name][0] > version}
        for name in left - later:
            self._live.setdefault(known[name], self._make(name, None))
        self._unload_everywhere(later)

    def _held(self, url: str) -> Answer:
        """Return the adapters that an engine holds, by name."""
        cards = self._fleet.get(url, "/v1/models").get("data", [])
        return {card["id"]: card for card in cards if card.get("parent")}

    def _load(self, url: str) -> Answer:
        """Load what an engine lacks: the new adapter, or all of them if it was restarted or joined. One that somebody
        else started may hold adapters of an earlier start of the run, or of a publish that it did not survive."""
        held = self._held(url)
        if url in self._fleet.joining:
            for name in held:
                self._fleet.post(url, "/unload_lora_adapter", {"lora_name": name})
            held = {}
        for adapter in self._live.values():
            if adapter.name not in held and adapter.loadable:
                path, body = adapter.load(verify=self._verify)
                self._fleet.post(url, path, body)
        return {}

    def _unload(self, used: InUse) -> None:
        """Unload and drop all adapters but the newest and those in use."""
        whole = (*used.versions, self._newest)
        unused = [
            (version, name)
            for version, name in self._live
            if version not in whole and version not in used.past.get(name, ())
        ]
        dropped = [self._live.pop(key) for key in unused]
        self._unload_everywhere({adapter.name for adapter in dropped})
        for adapter in dropped:
            adapter.drop()

    def _unload_everywhere(self, names: set[str]) -> None:
        """Unload adapters from the engines that hold them. Trainers may have died before they had asked all."""

        def unload(url: str) -> Answer:
            for name in sorted(self._held(url).keys() & names):
                self._fleet.post(url, "/unload_lora_adapter", {"lora_name": name})
            return {}

        if names:
            self._fleet.on_each(unload)


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


def build(publishing: Publishing) -> tuple[AdapterPublisher, str] | None:
    """Return the publisher of versions as adapters, and how they travel; None if engines get merged weights. Engines
    that did not load this base from the model folder get it from the trainers."""
    rank, config = publishing.rank, publishing.rank.config
    names = adapter_names(config, rank.addresses.run_id)
    if names is None:
        return None
    make, why = build_adapters(config, publishing.fleet, host=os.environ["ASYNCRL_HOST"], folder=publishing.folder)
    dtype, adapters = getattr(torch, config.engine.dtype), AdapterWeights(publishing.policy.weights)

    def tensors(name: str) -> Iterator[tuple[str, Tensor]]:
        return ((tensor, value.to(dtype)) for tensor, value in adapters.tensors(name))

    resume, run_dir = rank.addresses.resume, rank.run_dir
    past = PastAdapters(
        run_dir,
        resume.parent.parent if resume and resume.parent.parent != run_dir else None,
        needed=partial(past_versions, config),
        checkpoints=CheckpointStore(run_dir).begun,
        describe=lambda given: user_config(config.trainer.lora, given, str(rank.addresses.model)),
    )
    other_base = bool(rank.addresses.attached) or _serves_other_base(config)
    publisher = AdapterPublisher(
        rank.parallel,
        publishing.fleet,
        {name: partial(tensors, name) for name in config.agents.adapters},
        make,
        config.weights,
        names=names,
        announce=publishing.source.announce,
        past=past,
        base=(lambda update: publishing.of_weights(RolloutSide(), update, merged=None)[0]) if other_base else None,
    )
    return publisher, why


def _serves_other_base(config: Config) -> bool:
    """Return whether the base in the engines is not that of the model folder."""
    others = (one.engine() for name, one in lookup.active(config).items() if name != NAME)
    return config.trainer.lora.base != "none" or any(hooks.needs_weights(config) for hooks in others)


def build_adapters(
    config: Config, fleet: Fleet, *, host: str, folder: Path
) -> tuple[Callable[[str, Tensors | None], PublishedAdapter], str]:
    """Return how adapters are kept for the engines, and the reason. `host` is rank 0's address, `folder` the one that
    all engines see."""
    carried, why = choose(config.weights.transport, list(fleet.urls), host, gpu=False)

    def make(name: str, tensors: Tensors | None) -> PublishedAdapter:
        if tensors is None:
            return AdapterFolder(name, folder)
        peft = engine_config(config.trainer.lora, tensors)
        if carried == "tensor":
            return SharedAdapter(name, peft, tensors, config.engine.ranks)
        return AdapterFolder(name, folder, peft, tensors)

    if carried == "tensor":
        return make, f"adapters in shared memory ({why})"
    return make, f"adapters in {folder}, on a file system that the engines share"
