"""Memory per GPU of plans from a recorded run: measured, where the trainer is the run's; elsewhere computed from the
shapes of its model, if the folder that it names is here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.extensions.plan import memory
from asyncrl.extensions.plan.fit import Fit
from asyncrl.extensions.plan.search import GpuSplit
from asyncrl.extensions.plan.settings import layout_of, served_adapters, told_of_memory, training_of
from asyncrl.extensions.plan.shapes import Shape, counted, shape_of
from asyncrl.extensions.plan.tensors import Weight, tensors
from asyncrl.models.architectures import flat

PEAK = "memory/peak"


class RunMemory:
    """What a recorded run and its model tell about the memory of other splits."""

    def __init__(self, run: Fit, *, gpu: bool) -> None:
        """`gpu`: the run was on GPUs. On CPUs nothing is computed."""
        self._settings, self._peak = run.settings, max((one[PEAK] for one in run.steps if PEAK in one), default=None)
        self._model = _model(run.settings) if gpu else None

    def added(self, split: GpuSplit) -> GpuSplit:
        """Return a split with what is known: nothing where engines and trainer use the same GPUs."""
        if split.colocated:
            return split
        found = dict[str, float]()
        same = split.trainers == self._settings.trainer.world_size and self._peak is not None
        if same:
            found["trainer"] = float(self._peak or 0)
        elif self._model:
            found["trainer"] = self._trainer(*self._model, split)
        if self._model and split.shape.kv_tokens < math.inf:
            found["engine"] = self._engine(*self._model, split)
        return replace(split, memory=found, measured=("trainer",) if same else ())

    def _trainer(self, weights: Sequence[Weight], shape: Shape, split: GpuSplit) -> float:
        trainer = self._settings.trainer
        data = split.trainers * trainer.data_parallel // trainer.world_size
        training = training_of(self._settings, gpu=True)
        return sum(memory.trainer_rank(weights, shape, replace(layout_of(trainer), data=data), training).values())

    def _engine(self, weights: Sequence[Weight], shape: Shape, split: GpuSplit) -> float:
        engine = self._settings.engine
        parts = memory.engine_rank(
            weights,
            shape,
            tensor=split.engine_gpus // engine.pipeline_parallel,
            dtype=engine.dtype,
            tokens=int(split.shape.kv_tokens),
            replicas=engine.data_parallel,
            stages=engine.pipeline_parallel,
            cache_dtype=str(engine.server_args.get("kv_cache_dtype") or ""),
            linear_bytes=told_of_memory(self._settings).get("linear_bytes"),
            **served_adapters(self._settings),
        )
        return sum(parts.values())


def _model(settings: Config) -> tuple[list[Weight], Shape] | None:
    """Return the weights and the shape of a run's model; None if its config.json is not here, or is of a family or in
    number formats of which the memory is not known."""
    if "auto" in (settings.trainer.dtype, settings.engine.dtype):
        return None
    try:
        hf = flat(json.loads((Path(settings.model.path).expanduser() / "config.json").read_text()))
        shape = shape_of(hf)
        return counted(tensors(hf), shape), shape
    except (OSError, ValueError, KeyError, TypeError, ConfigError):
        return None
