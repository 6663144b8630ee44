"""The transport of a run, built from its settings, and the folder of versions that travel as files."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from asyncrl.config import Config
from asyncrl.engine.fleet import Fleet
from asyncrl.errors import WeightsError
from asyncrl.user_code import load
from asyncrl.weights.choice import choose
from asyncrl.weights.distributed import DistributedTransport
from asyncrl.weights.transport import TensorTransport, Transport


def build_transport(
    config: Config, fleet: Fleet, *, host: str, alone: bool, stage: int, gpu: bool, folder: Path
) -> tuple[Transport, str]:
    """Build the transport of one pipeline stage's exporting rank. Returns it with the reason for the choice.

    `host` is the rank's address. `alone` says that all trainer ranks are on that host; otherwise the host is not used,
    because stages on several machines must make the same choice. `gpu` says whether the trainer runs on GPUs. `folder`
    is where files are written.
    """
    ranks = config.engine.ranks
    shared, host_of_all = config.cluster.shares_gpus, host if alone else ""
    name, reason = choose(config.weights.transport, list(fleet.urls), host_of_all, gpu=gpu, shared=shared)
    if name == "tensor":
        return TensorTransport(fleet, ranks), f"tensor ({reason})"
    if offered := config.transport:
        kind = load(offered.path, "weights.transport")
        transport = kind(fleet=fleet, folder=folder, stage=stage, ranks=ranks, host=host, gpu=gpu)
        return transport, f"{name} in {folder} ({reason})" if offered.by_file else f"{name} ({reason})"
    backend = "nccl" if gpu else "gloo"
    transport = DistributedTransport(fleet, ranks, host=host, stage=stage, backend=backend)
    return transport, f"distributed over {backend} ({reason})"


def publish_folder(shared: str | None, run_dir: Path) -> Path:
    """Return a folder that belongs to this run alone, because several runs may share `weights.folder`. Its name there
    follows from the path of the run folder, so that a resumed run finds it again."""
    if not shared:
        return run_dir / "weights"
    digest = hashlib.sha256(os.fsencode(run_dir.absolute())).hexdigest()[:12]
    return Path(shared).expanduser() / "-".join(filter(None, (run_dir.parent.name, run_dir.name, digest)))


def claim(folder: Path) -> None:
    """Create a private folder, or check that it belongs to this user. Raises WeightsError if it does not: its owner
    could exchange the files before the engines load them."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found, owner = folder.lstat(), None
    if stat.S_ISDIR(found.st_mode):
        with suppress(PermissionError), tempfile.TemporaryFile(dir=folder) as own:
            owner = os.fstat(own.fileno()).st_uid  # not our number where the file system maps users
    if owner != found.st_uid:
        raise WeightsError(f"{folder} belongs to another user, or is a link: remove it, or set another weights.folder")
