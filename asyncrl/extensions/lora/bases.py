"""Formats of the frozen weights below adapters, which extensions offer in the attribute `bases` of their classes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from asyncrl.lookup import classes
from asyncrl.user_code import load

if TYPE_CHECKING:
    from asyncrl.parallel import Parallel
    from asyncrl.weights.reshard import Resharder


@dataclass(frozen=True)
class OfferedBase:
    """A format of the frozen weights below adapters."""

    path: str
    """Import path of its class (BaseFormat), which is created with the name."""
    bytes: float
    """Bytes of an element, with its share of what it needs beside."""


class BaseFormat(Protocol):
    """A format of the frozen weights below adapters (trainer.lora.base). A layer whose weights have it gets a module
    `packed` that has a method `dequantized` and holds its tensors in buffers."""

    def pack(self, weights: Resharder) -> None:
        """Change the weights of this rank's linear layers with adapters, before data parallelism wraps the model.
        Raises ConfigError if one of them does not fit."""
        ...

    def keep(self, run_dir: Path, origin: Path | None, weights: Resharder, parallel: Parallel) -> None:
        """Store the base in the run folder, once for all checkpoints. Runs on every rank. `origin` is the folder of the
        run whose checkpoint is resumed. Raises RecordError if that run had another base, and WeightsError if the disk
        cannot take it."""
        ...


def bases() -> dict[str, OfferedBase]:
    """Return the formats of the extensions that need not be named, by name."""
    return {name: base for kind in classes({}).values() for name, base in getattr(kind, "bases", {}).items()}


def base_format(name: str) -> BaseFormat | None:
    """Return the format of this name; None if the base has that of the other weights."""
    base = bases().get(name)
    made: BaseFormat | None = load(base.path, "trainer.lora.base")(name) if base else None
    return made
