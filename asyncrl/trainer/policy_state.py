"""What a checkpoint holds of the policy in training, and what it leaves to the run folder."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from asyncrl.errors import RecordError
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.sharded import ShardedState
from asyncrl.weights.folder import HFFolder


class PolicyState:
    """The state of a rank's policy, with the networks and the states of extensions."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.folder = policy.folder

    @cached_property
    def base_hash(self) -> str | None:
        """Return the hash of the model folder's weights, if they are frozen: a checkpoint does not hold them."""
        if not self._policy.network.transformation.frozen:
            return None
        with HFFolder(self.folder) as weights:
            return weights.digest()

    def keep_base(self, run_dir: Path, resumed: Path | None) -> None:
        """Keep what checkpoints do not hold. `resumed` is the checkpoint of another run that this one resumes."""
        policy, origin = self._policy, resumed.parent.parent if resumed else None
        policy.network.transformation.keep(run_dir, origin, policy.weights, policy.parallel)

    def sharded(self) -> dict[str, ShardedState]:
        """Return the networks by the name of their checkpoint folder."""
        policy = self._policy
        every = {"policy": (policy.network, policy.optimizer), **policy.others}
        return {name: ShardedState(*trained, policy.readable) for name, trained in every.items()}

    def counters(self) -> dict[str, Any]:
        """Return the counters that a checkpoint holds besides weights and moments."""
        others = {name: optimizer.counters() for name, (_, optimizer) in self._policy.others.items()}
        return {"optimizer": self._policy.optimizer.counters(), **others}

    def of_extensions(self) -> dict[str, bytes]:
        """Return the states of extensions that have one, by name."""
        states = ((name, hooks.state()) for name, hooks in self._policy.hooks.items())
        return {name: state for name, state in states if state is not None}

    def restore(self, counters: dict[str, Any], states: dict[str, bytes]) -> None:
        """Restore what `counters` and `of_extensions` returned. Raises RecordError if an extension is missing."""
        policy = self._policy
        policy.optimizer.restore(counters["optimizer"])
        for name, state in states.items():
            if name not in policy.hooks:
                raise RecordError(f"the checkpoint was written with the extension {name}: set extensions.{name} again")
            policy.hooks[name].restore(state)
        for name, (_, optimizer) in policy.others.items():
            optimizer.restore(counters[name])
