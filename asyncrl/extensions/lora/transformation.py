"""A network whose weights are frozen, and whose adapters are trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from asyncrl.algo.samples import Sample
from asyncrl.config import AgentsConfig
from asyncrl.config.lora import LoraConfig
from asyncrl.extensions.lora import layers
from asyncrl.extensions.lora.bases import base_format
from asyncrl.extensions.lora.peft import start_from, write_peft
from asyncrl.extensions.lora.peft_config import adapter_folders, user_config
from asyncrl.extensions.lora.roles import adapter_of
from asyncrl.extensions.lora.weights import AdapterWeights
from asyncrl.parallel import Parallel
from asyncrl.trainer.microbatches import Groups
from asyncrl.trainer.transformation import Transformation
from asyncrl.weights.export import gathered, save_hf
from asyncrl.weights.reshard import Resharder


class Adapted(Transformation):
    """Adapters of these names on all layers that the settings name, one of which computes at a time."""

    frozen = True

    def __init__(self, settings: LoraConfig, agents: AgentsConfig | None = None) -> None:
        """`agents` names the adapters of roles; without, there is one for all."""
        self._settings = settings
        self._agents = agents or AgentsConfig(roles={})
        self._names = self._agents.adapters
        self._base = base_format(settings.base)
        self._modules: list[layers.LinearAdapters] = []
        self.random = settings.dropout > 0

    def apply(self, chunks: Sequence[GPTModel], weights: Resharder) -> None:
        """Freeze the weights and add the adapters. Raises ConfigError, or WeightsError for a folder to start from."""
        layers.add(chunks, weights, self._settings, self._names)
        if self._settings.path:
            start_from(Path(self._settings.path).expanduser(), AdapterWeights(weights), self._names)
        if self._base:
            self._base.pack(weights)
        self._modules = list(layers.modules(chunks))

    def model_of(self, role: str) -> str:
        """Return the adapter of a role. Raises ConfigError if it has none."""
        return adapter_of(self._agents, role)

    def divided(self, groups: Groups) -> list[tuple[str, Groups]]:
        """Return the samples of each adapter that has some, in their groups. A single one computes all."""
        names = self._names
        if len(names) == 1:
            return [(names[0], groups)]
        found: dict[str, list[list[Sample]]] = {name: [] for name in names}
        for group in groups:
            for name, own in found.items():
                if mine := [sample for sample in group if sample.model == name]:
                    own.append(mine)
        return [(name, own) for name, own in found.items() if own] or [(names[0], groups)]

    def use(self, model: str | None, *, gradient: bool) -> None:
        """Let one adapter compute, with dropout in passes with gradient."""
        for adapters in self._modules:
            adapters.skipped = adapters.adapter != model
            adapters.train(gradient)

    def of_another(self) -> Adapted:
        """Return one adapter, which starts from the same folder unless that holds several."""
        several = len(self._names) > 1
        return Adapted(self._settings.model_copy(update={"path": None}) if several else self._settings)

    def keep(self, run_dir: Path, origin: Path | None, weights: Resharder, parallel: Parallel) -> None:
        """Store a base in a format of its own."""
        if self._base:
            self._base.keep(run_dir, origin, weights, parallel)

    def save(self, target: Path, base: Path, weights: Resharder, parallel: Parallel, dtype: str) -> None:
        """Save the adapters as PEFT folders that name `base` as their model, several below TARGET; with save_merged
        also the weights that each gives, in TARGET-merged."""
        for name, folder in adapter_folders(target, self._names).items():
            tensors = gathered(AdapterWeights(weights).tensors(name), parallel)
            if parallel.is_first:
                write_peft(folder, user_config(self._settings, tensors, str(base)), tensors.items())
            dist.barrier()
        merged = target.with_name(f"{target.name}-merged")
        for name, folder in adapter_folders(merged, self._names).items() if self._settings.save_merged else ():
            save_hf(folder, base, weights, parallel, dtype, merged=name)


def transformation_of(settings: LoraConfig, agents: AgentsConfig | None = None) -> Adapted | None:
    """Return the adapters of these settings; None if all weights are trained."""
    return None if settings.rank is None else Adapted(settings, agents)
