"""Delta transport: only the bits that differ from the version that the engines serve, through shared files.

After an optimizer step in bfloat16 most weights keep the same bits. For each bucket, the file holds the positions and
new values of the changed weights. It holds the whole bucket if that is smaller, if the state of the engines is unknown,
if a tensor's dtype has no NaN to stand for "unchanged", or if a new value is itself NaN. The engine's half is
loader.py: before it changes anything it checks every file's checksum and the version that the update
builds on, and it reports a refusal in a receipt. Loading a sparse update through the model's own loader, with NaN for
"unchanged", is the idea of verl's delta_sharded weight transfer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.extensions.delta.extension import Delta
from asyncrl.extensions.files.transport import DiskTransport
from asyncrl.weights.bucket import Bucket, plan_buckets, unit_of, views
from asyncrl.weights.folder import write_stream

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
RECEIPT_POLL = 0.01


class DeltaTransport(DiskTransport):
    """SGLang's update_weights_from_tensor with our loader as its load_format. HTTP carries only the folder's name."""

    session = True

    def __init__(self, *, fleet: Fleet, folder: Path, stage: int, ranks: int, **_: Any) -> None:
        super().__init__(fleet, folder, stage)
        self._ranks = ranks
        self._base: dict[int, Tensor] = {}  # bucket number -> its bytes as the engines hold them
        self._base_version: int | None = None
        self._full = True

    def start(self, version: int, *, full: bool = False) -> None:
        """Start a version. If engines join, all engines get everything, because those that join have no base
        version."""
        super().start(version)
        self._full = full or bool(self._fleet.joining) or self._base_version is None

    def send(self, flat: Tensor, bucket: Bucket) -> None:
        """Write one file, of changes or of everything. Raises WeightsError if the disk cannot take it."""
        file, base = self._next_file(), self._base.get(self._written)
        changes = None if self._full or base is None else changed(flat, base, bucket)
        if changes is None:
            self._write(file, flat, bucket, "full")
        else:
            packed = plan_buckets([(name, t.dtype, t.shape) for name, t in changes.items()], 1 << 62)
            held = packed[0] if packed else []
            flat_changes = torch.empty(held[-1].end if held else 0, dtype=torch.uint8)
            for name, place in views(flat_changes, held).items():
                place.copy_(changes[name])
            self._write(file, flat_changes, held, "delta", {e.name: (str(e.dtype), list(e.shape)) for e in bucket})
        if base is None:
            self._base[self._written] = flat.clone()
        else:
            base.copy_(flat)

    def _write(self, file: Path, flat: Tensor, bucket: Bucket, kind: str, of: dict | None = None) -> None:
        digest = hashlib.sha256(flat.numpy().data).hexdigest()
        told = {"kind": kind, "sha256": digest, "of": json.dumps(of or {})}
        write_stream(file, bucket, iter(views(flat, bucket).items()), told, durable=False)

    def deliver(self, version: int) -> bool:
        """Let the engines apply the folder, and read their receipts. Returns False if an engine refused a delta: then
        it needs the full weights."""
        folder = self._commit(version)
        (folder / "receipts").mkdir()
        built_upon = None if self._full else self._base_version
        bodies = {}
        for number, url in enumerate(self._fleet.urls):
            order = {"folder": str(folder), "version": version, "base": built_upon, "engine": number}
            payload = base64.b64encode(pickle.dumps([(json.dumps(order), torch.zeros(1))])).decode()
            bodies[url] = {
                "serialized_named_tensors": [payload] * self._ranks,
                "load_format": Delta.transports["delta"].loader,
                "flush_cache": False,
            }
        self._fleet.finish(self._fleet.start("/update_weights_from_tensor", bodies))
        refusals = self._receipts(folder, {url: number for number, url in enumerate(bodies)})
        for url, reason in refusals.items():
            if self._full:
                self._fleet.lose(url, f"{url} refused a full update: {reason}")
        self._forget_old(version)
        return not refusals or self._full

    def accepted(self, version: int) -> None:
        """Record the version as the base of the next delta."""
        self._base_version = version

    def _receipts(self, folder: Path, numbers: dict[str, int]) -> dict[str, str]:
        """Return refusals by engine. An engine whose receipts do not appear in time is lost (a shared file system may
        show them late)."""
        deadline = time.monotonic() + self._fleet.timeout
        refusals: dict[str, str] = {}
        for url, number in numbers.items():
            while url in self._fleet.urls:
                found = [json.loads(file.read_text()) for file in (folder / "receipts").glob(f"{number}-*.json")]
                if len(found) == self._ranks:
                    if reasons := {reason for receipt in found if (reason := receipt["refused"])}:
                        refusals[url] = "; ".join(sorted(reasons))
                    break
                if time.monotonic() > deadline:
                    self._fleet.lose(url, f"{url} left {len(found)} of {self._ranks} receipts in {folder}")
                time.sleep(RECEIPT_POLL)
        return refusals


def changed(flat: Tensor, base: Tensor, bucket: Bucket) -> dict[str, Tensor] | None:
    """Return the positions (int32 if they fit, else int64) and new bits of what differs, as NAME|at and NAME|to. None
    means to send everything."""
    found: dict[str, Tensor] = {}
    size = 0
    for entry in bucket:
        bits = BITS[entry.dtype.itemsize]
        new, old = (memory[entry.start : entry.end].view(bits) for memory in (flat, base))
        at = (new != old).nonzero().flatten()
        if not len(at):
            continue
        to = new[at]
        if not entry.dtype.is_floating_point or entry.dtype.itemsize == 1 or to.view(entry.dtype).isnan().any():
            return None
        if len(new) < 1 << 31:
            at = at.to(torch.int32)
        found[f"{entry.name}|at"], found[f"{entry.name}|to"] = at, to
        size += at.nbytes + to.nbytes
        if size >= flat.numel():
            return None
    touched = {unit_of(entry.name) for entry in bucket if f"{entry.name}|at" in found}
    for entry in bucket:  # tensors that must arrive together do, even with nothing to change
        if unit_of(entry.name) in touched and f"{entry.name}|at" not in found:
            found[f"{entry.name}|at"] = torch.empty(0, dtype=torch.int32)
            found[f"{entry.name}|to"] = torch.empty(0, dtype=BITS[entry.dtype.itemsize])
    return found
