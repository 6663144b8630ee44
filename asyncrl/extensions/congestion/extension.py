"""What this folder adds: the limiter of rollout.max_running_groups=auto."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.extension import Extension, RolloutHooks
from asyncrl.user_code import load

if TYPE_CHECKING:
    from asyncrl.rollout.groups import ConcurrencyLimiter
    from asyncrl.rollout.reporters import RolloutRun


class CongestionRollout(RolloutHooks):
    """What limits the groups of a run."""

    def limits(self, run: RolloutRun) -> ConcurrencyLimiter:
        """Return the limiter. The machine's load counts, too, where agents start programs on it."""
        from asyncrl.extensions.congestion.limiter import AdaptiveConcurrency
        from asyncrl.extensions.congestion.window import ConcurrencyWindow

        config = run.config
        named = {config.agent, *(task.agent for task in config.mixture.values())} - {None}
        programs = any(getattr(load(name, "agent"), "runs_programs", False) for name in named if name)
        return AdaptiveConcurrency(ConcurrencyWindow(config.rollout.max_new_tokens), programs=programs)


class Congestion(Extension):
    """As many groups at once as keep engines and trainer busy."""

    enables = ("rollout.max_running_groups",)
    metrics = {  # noqa: RUF012
        "concurrency/limit": "number of episodes that may run at the same time",
        "concurrency/in_play": "number of episodes that were running when the batch was taken",
        "concurrency/cuts": "number of times the limit was lowered to relieve the engines, since the start of the run",
        "engines/prefill_wasted": "fraction of the engines' time spent on prefilling tokens they had prefilled before",
    }

    def rollout(self) -> RolloutHooks:
        """Return the hooks in the rollout process."""
        return CongestionRollout()


Own = Congestion
