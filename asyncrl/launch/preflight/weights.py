"""Checks of the transport of new weights to the engines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from asyncrl.config import Config, on_gpu
from asyncrl.config.lora import resident_adapters
from asyncrl.errors import ConfigError
from asyncrl.launch.placement import Placement
from asyncrl.launch.preflight.findings import Finding, error, ok
from asyncrl.launch.preflight.model_files import BYTES, Weight
from asyncrl.weights.choice import choose


def check_sync(config: Config, placement: Placement, weights: Sequence[Weight], gpus: int) -> list[Finding]:
    """Report the transport, the reason for it, and the size of a publish. `gpus` is per machine, as in
    addresses.json."""
    if config.mode != "train" or not placement.trainers:
        return []
    engines, gpu = (*placement.urls()["engines"], *config.engine.urls), on_gpu(config.trainer, gpus)
    hosts = {seat.node.address for seat in placement.trainers}
    try:
        host = hosts.pop() if len(hosts) == 1 else ""  # as weights/publish.py receives it
        shared, gpu = config.cluster.shares_gpus, gpu and not config.serves_adapters
        chosen, why = choose(config.weights.transport, engines, host, gpu=gpu, shared=shared)
    except ConfigError as problem:
        return [error(problem.field, str(problem.value), problem.remedy)]
    if config.serves_adapters:
        carried = "adapters in shared memory" if chosen == "tensor" else "adapters as PEFT folders"
        text = f"{carried}: {why}; at most {resident_adapters(config)} in each engine"
        return [ok("weights.transport", text)]
    item = BYTES[config.trainer.dtype]
    sizes = [one.elements * item for one in weights]
    count = len(packed(sizes, config.weights.bucket_mb << 20))
    text = f"{chosen}: {why}; {sum(sizes) / 1e9:.3g} GB per publish, in about {count} bucket(s)"
    return [ok("weights.transport", text)]


def check_shared(
    config: Config, missing: Mapping[str, Sequence[str]], folder: str, models: Mapping[str, str]
) -> list[Finding]:
    """Check that all machines see the run folder, the folder of published files, and the model folders.
    `models` maps model folders to their settings; `missing` maps each machine to the folders that it does not see."""
    found = []
    for machine, paths in sorted(missing.items()):
        for path in paths:
            files = config.sends_files or config.serves_adapters
            by_files = path == folder and files
            field = models.get(path) or ("weights.folder" if by_files else "run.dir")
            text = f"on {machine}, {path} is not the folder that the first machine sees"
            found.append(error(field, text, "Choose a folder on a file system that all machines of the job share."))
    return found


def packed(sizes: Iterable[int], limit: int) -> list[tuple[int, int]]:
    """Return the bytes and the number of tensors of each bucket, in order, as weights/bucket.py plans them. A larger
    tensor gets a bucket of its own."""
    found: list[tuple[int, int]] = []
    for size in sizes:
        filled, count = found[-1] if found else (limit, 0)
        if not found or filled + size > limit:
            found.append((size, 1))
        else:
            found[-1] = (filled + size, count + 1)
    return found
