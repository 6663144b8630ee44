"""The choice of transport for new weights. Does not import torch, because the launcher reports the choice before
anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from asyncrl.errors import ConfigError

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def choose(setting: str, engines: Sequence[str], host: str, *, gpu: bool) -> tuple[str, str]:
    """Return the transport for the setting `weights.transport`, and the reason. Raises ConfigError if it cannot reach
    the engines."""
    hosts = {str(urlsplit(url).hostname) for url in engines}
    here = hosts <= LOOPBACK | {host}
    if setting == "tensor" and not here:
        raise ConfigError(
            "weights.transport",
            setting,
            f"The engines are on the hosts {sorted(hosts)}, but shared memory works only within one host: set auto.",
        )
    if setting != "auto":
        return setting, "as configured"
    if gpu:
        return "distributed", "trainers and engines have separate GPUs: NCCL uses the fastest path between them"
    if here:
        return "tensor", "all engines are on this host: buckets travel through shared memory"
    return "distributed", f"engines are on {sorted(hosts)}: buckets travel by broadcast"
