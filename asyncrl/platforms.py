"""What the ranks of trainers and engines compute on: CUDA, which is built in, or what an extension offers for machines
without GPUs.

The launcher asks for the platform of a section of the settings (config.on_gpu), a process for its own, which follows
from the GPUs that the launcher left visible to it. What the launcher uses of a platform does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from asyncrl.errors import LaunchError
from asyncrl.lookup import classes
from asyncrl.user_code import load

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algo.pack import Pack
    from asyncrl.config import Config, EngineConfig
    from asyncrl.launch.precision import DtypeChoice

Everywhere = Callable[[list[str], float, Sequence[str]], list[str]]
"""Runs a program on each of these machines, for at most so many seconds, and returns what each printed."""


class Platform:
    """A kind of device. Its defaults are those of CUDA, for which torch, Megatron and SGLang are made."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Environment of every trainer and engine."""
    engine_arguments: ClassVar[Mapping[str, Any]] = {}
    """SGLang's arguments of every engine. They replace the run's own, and engine.server_args replaces them."""
    deterministic_arguments: ClassVar[Mapping[str, Any]] = {}
    """Further arguments with which an answer depends on weights, prompt and seed alone."""

    def engine_environment(self, ranks: int) -> dict[str, str]:
        """Return the environment of an engine of so many ranks."""
        return {}

    def check_engine(self, engine: EngineConfig) -> None:
        """Refuse what engines cannot do. Raises ConfigError."""

    def choose(
        self,
        config: Config,
        choices: Sequence[DtypeChoice],
        models: Mapping[str, dict[str, Any]],
        machines: Mapping[str, Sequence[str]],
        everywhere: Everywhere,
    ) -> list[DtypeChoice]:
        """Return the number formats of these parts of a run, of which those that are `auto` are still open. `models`
        and `machines` have the config.json of each part's model and the names of its machines, where `everywhere` runs
        a program (Cluster.everywhere); "" is this machine. Raises LaunchError. CUDA is never asked: it computes in
        bfloat16."""
        raise NotImplementedError

    def prepare_engine(self) -> None:
        """Prepare this process for the first import of sglang."""

    def prepare_trainer(self) -> None:
        """Prepare this process for the first import of megatron.core. Raises LaunchError if TransformerEngine is
        installed but cannot be imported.

        Without one of its packages or CUDA libraries, importing it raises any of the errors below. Megatron catches
        only ImportError, and not in all places, so that it would fail later without naming the cause, or run without
        the layers that were asked for.
        """
        if importlib.util.find_spec("transformer_engine") is None:
            return
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, AssertionError, RuntimeError, OSError) as error:
            what = f"TransformerEngine is installed but cannot be imported: {type(error).__name__}: {error}"
            raise LaunchError(f"{what}. {TRANSFORMER_ENGINE}") from error

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, pack: Pack, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend as trainer/tree_attention.py does, which does so on CUDA itself."""
        raise NotImplementedError


TRANSFORMER_ENGINE = (
    "Install the packages of requirements/gpu.txt, or remove TransformerEngine (pip uninstall transformer_engine "
    "transformer_engine_cu13 transformer_engine_torch): the trainer then has Megatron's own layers and optimizer."
)
MISSING = (
    "This machine has no visible GPU, and no extension offers a platform for it: use a machine with GPUs, or install "
    "an extension that has one (Extension.platform in docs/extensions.md)."
)
CUDA = Platform()


def chosen(*, gpu: bool) -> Platform:
    """Return the platform of processes with or without GPUs. Raises LaunchError if there is none."""
    return CUDA if gpu else without_gpu()


@cache
def without_gpu() -> Platform:
    """Return the platform of machines without GPUs, of an installed package before that of asyncrl's own folder. Raises
    LaunchError if no extension offers one."""
    offers = [(name, kind.platform) for name, kind in classes({}).items() if kind.platform]
    if not offers:
        raise LaunchError(MISSING)
    name, path = offers[-1]
    platform: Platform = load(path, f"extensions.{name}")()
    return platform


@cache
def here() -> Platform:
    """Return the platform of this process. Raises LaunchError if there is none."""
    import torch

    return chosen(gpu=torch.cuda.is_available())
