"""The engine's half of transport.py: a custom weight loader that runs inside SGLang's scheduler.

SGLang ends an engine whose loader raises. Every rank therefore writes a receipt with the error, if any,
into the update's folder, and the trainer reads the receipts. The loader changes nothing before it has verified every
file's checksum and the version that the update builds upon, so a refused update leaves the weights as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DeltaMismatch(Exception):
    """Raised when the update does not fit the weights that this engine holds."""


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Apply one update and write a receipt. SGLang calls this as a custom loader.

    The name of the only tensor is the order (folder, engine, version, base) as JSON.
    """
    order = json.loads(named_tensors[0][0])
    refused = None
    try:
        apply(model, order)
    except Exception as error:  # noqa: BLE001  reported in the receipt: raising would end the engine
        refused = f"{type(error).__name__}: {error}"
    receipt = Path(order["folder"]) / "receipts" / f"{order['engine']}-{own_rank()}.json"
    partial = receipt.with_suffix(".partial")
    partial.write_text(json.dumps({"refused": refused}))
    os.rename(partial, receipt)


def own_rank() -> int:
    """Return the number of this process's rank in the engine, counted through its pipeline stages."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)


def apply(model: Any, order: dict[str, Any]) -> None:
    """Load a full update, or the changes from version `base` to `version`.

    Raises DeltaMismatch, before anything is changed, when the update does not fit or a file is damaged.
    """
    held, version, base = getattr(model, "asyncrl_version", None), order["version"], order["base"]
    if held == version and base is not None:
        raise DeltaMismatch(f"version {version} is already applied")
    if base is not None and held != base:
        raise DeltaMismatch(f"the changes are relative to version {base}, but this engine holds {held}")
    files = sorted(Path(order["folder"]).glob("*.safetensors"))
    headers = [_checked(file) for file in files]
    if base is None and any(header["kind"] != "full" for header in headers):
        raise DeltaMismatch("a full update contains files with changes only")
    model.asyncrl_version = None  # unknown until the last tensor is in place
    for file, header in zip(files, headers, strict=True):
        if header["kind"] == "full":
            with safe_open(file, framework="pt") as tensors:
                model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
        else:
            with KeepWhereNaN():
                model.load_weights(_sparse(file, json.loads(header["of"])))
    model.asyncrl_version = version


def _checked(file: Path) -> dict[str, str]:
    """Return a file's header. Raises DeltaMismatch when the checksum of its content does not match."""
    with safe_open(file, framework="pt") as tensors:
        header: dict[str, str] = tensors.metadata()
    with file.open("rb") as content:
        content.seek(8 + int.from_bytes(content.read(8), "little"))
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != header["sha256"]:
        raise DeltaMismatch(f"{file.name} is damaged: its checksum is {digest[:12]} instead of {header['sha256'][:12]}")
    return header


def _sparse(file: Path, of: dict[str, tuple[str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of full size that hold the new values where values changed, and NaN elsewhere."""
    with safe_open(file, framework="pt") as tensors:
        names = [name.removesuffix("|at") for name in tensors.keys() if name.endswith("|at")]  # noqa: SIM118
        for name in names:
            dtype, shape = getattr(torch, of[name][0].removeprefix("torch.")), of[name][1]
            full = torch.full(shape, float("nan"), dtype=dtype)
            at, to = tensors.get_tensor(f"{name}|at"), tensors.get_tensor(f"{name}|to")
            full.view(-1)[at.long()] = to.view(dtype)
            # SGLang loads a tensor with this attribute in the calling thread, and KeepWhereNaN applies to that alone.
            full._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]
            yield name, full


class KeepWhereNaN(TorchDispatchMode):
    """Dispatch mode in which copies keep the target's value where the source is NaN.

    With it, a model's own loader applies a sparse update.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation. Only aten.copy_ behaves differently."""
        if func is torch.ops.aten.copy_.default and args[1].is_floating_point():
            target, source = args[0], args[1].to(args[0].device)
            args = (target, torch.where(source.isnan(), target, source.to(target.dtype)))
        return func(*args, **(kwargs or {}))
