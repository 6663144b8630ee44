"""The engine's half of weights/delta.py: runs inside SGLang's scheduler, as a custom weight loader.

SGLang ends an engine whose loader raises, so whatever goes wrong becomes a receipt in the update's folder, written by
every tensor-parallel rank; the trainer reads them. Nothing is changed before every file's checksum and the version that
the update builds upon are found right, so a refused update leaves the weights as they were.
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


class Refused(Exception):
    """The update does not fit what this engine holds."""


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """SGLang's signature of a custom loader; the only name is the order, as JSON."""
    order = json.loads(named_tensors[0][0])
    refused = None
    try:
        apply(model, order)
    except Exception as error:  # noqa: BLE001  told in the receipt: raising would end the engine
        refused = f"{type(error).__name__}: {error}"
    receipt = Path(order["folder"]) / "receipts" / f"{order['engine']}-{_rank()}.json"
    partial = receipt.with_suffix(".partial")
    partial.write_text(json.dumps({"refused": refused}))
    os.rename(partial, receipt)


def apply(model: Any, order: dict[str, Any]) -> None:
    """Load a full update, or the changes from version `base` to `version`. Raises Refused and leaves all as it was."""
    held, version, base = getattr(model, "asyncrl_version", None), order["version"], order["base"]
    if held == version and base is not None:
        raise Refused(f"version {version} is already applied")
    if base is not None and held != base:
        raise Refused(f"the changes build upon version {base}, this engine holds {held}")
    files = sorted(Path(order["folder"]).glob("*.safetensors"))
    headers = [_checked(file) for file in files]
    if base is None and any(header["kind"] != "full" for header in headers):
        raise Refused("a full update that holds changes only")
    model.asyncrl_version = None  # until the last tensor is in place
    for file, header in zip(files, headers, strict=True):
        if header["kind"] == "full":
            with safe_open(file, framework="pt") as tensors:
                model.load_weights((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118
        else:
            with KeepWhereNaN():
                model.load_weights(_sparse(file, json.loads(header["of"])))
    model.asyncrl_version = version


def _checked(file: Path) -> dict[str, str]:
    """A file's own header. Raises Refused when its bytes are not those that were written."""
    with safe_open(file, framework="pt") as tensors:
        header: dict[str, str] = tensors.metadata()
    with file.open("rb") as content:
        content.seek(8 + int.from_bytes(content.read(8), "little"))
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != header["sha256"]:
        raise Refused(f"{file.name} is damaged: its checksum is {digest[:12]}, written was {header['sha256'][:12]}")
    return header


def _sparse(file: Path, of: dict[str, tuple[str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of NaN, with the new values where they changed."""
    with safe_open(file, framework="pt") as tensors:
        names = [name.removesuffix("|at") for name in tensors.keys() if name.endswith("|at")]  # noqa: SIM118
        for name in names:
            dtype, shape = getattr(torch, of[name][0].removeprefix("torch.")), of[name][1]
            full = torch.full(shape, float("nan"), dtype=dtype)
            at, to = tensors.get_tensor(f"{name}|at"), tensors.get_tensor(f"{name}|to")
            full.view(-1)[at.long()] = to.view(dtype)
            full._sglang_runai_streamer_tensor = True  # type: ignore[attr-defined]  # loaded in this thread: the mode holds in no other
            yield name, full


class KeepWhereNaN(TorchDispatchMode):
    """Copies leave the target's value where the source is NaN: so a model's own loader applies a sparse update."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Only aten.copy_ is changed."""
        if func is torch.ops.aten.copy_.default and args[1].is_floating_point():
            target, source = args[0], args[1].to(args[0].device)
            args = (target, torch.where(source.isnan(), target, source.to(target.dtype)))
        return func(*args, **(kwargs or {}))


def _rank() -> int:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)
