"""What this folder adds: tokens per second, cache hits and preemptions of engines, and the use of GPUs."""

from __future__ import annotations

from asyncrl import extension


class CountersExtension(extension.Extension):
    """Counters of engines, and what the GPUs do."""

    metrics = {  # noqa: RUF012
        "engines/tokens_per_s": "number of tokens that the engines generated per second",
        "engines/tokens_per_s/lowest": "the same, of the engine that generated fewest",
        "engines/cache_hit": "fraction of prompt tokens found in prefix caches, as a mean over the engines",
        "engines/preemptions": "number of requests that engines retracted because their cache was full, since their "
        "start",
        "engine/<engine>/tokens_per_s": "number of tokens that the engine generated per second",
        "gpu/<gpu>/utilization": "fraction of the time since the previous step in which the GPU was busy",
        "gpu/<gpu>/memory": "mean number of bytes in use on the GPU, by all processes",
    }
    """Those of engines are there with engine.metrics, over the last two seconds or more; <engine> is the host and port
    of one of the first 16. <gpu> is the number in NVML of a GPU of the rollout process's machine."""

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.counters.counters import Counters

        return Counters()


Own = CountersExtension
