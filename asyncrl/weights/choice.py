"""The choice of how new weights travel. Imports no torch, because the launcher reports the choice before anything is
started."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def choose(setting: str, engines: Sequence[str], host: str, *, gpu: bool, shared: bool = False) -> tuple[str, str]:
    """Return the transport for the setting `weights.transport`, and the reason. `shared` says that trainers and
    engines share their GPUs. Raises ConfigError if it cannot reach the engines."""
    hosts = {str(urlsplit(url).hostname) for url in engines}
    here = hosts <= LOOPBACK | {host}
    if not here and (setting == "tensor" or (setting == "auto" and shared)):
        raise ConfigError(
            "weights.transport",
            setting,
            f"The engines are on the hosts {sorted(hosts)}, but shared memory works only within one host: set "
            + ("disk." if shared else "auto."),
        )
    if setting != "auto":
        return setting, "as configured"
    if shared:
        return "tensor", "engines and trainers share their devices: engines read the buckets where they are"
    if gpu:
        return "distributed", "trainers and engines have separate GPUs: NCCL uses the fastest path between them"
    if here:
        return "tensor", "all engines are on this host: buckets travel through shared memory"
    return "distributed", f"engines are on {sorted(hosts)}: buckets travel by broadcast"
