"""What this folder adds: the metrics bias/*, and a warning."""

from __future__ import annotations

from asyncrl import extension


class Bias(extension.Extension):
    """A comparison of the trained groups with all that were generated."""

    metrics = {  # noqa: RUF012
        "bias/length": "mean number of tokens of the trained trajectories relative to all generated ones, minus 1",
        "bias/reward": "mean reward of the trained trajectories relative to all generated ones, minus 1",
        "bias/difficulty": "mean of the groups' mean rewards, trained relative to all generated ones, minus 1",
    }
    """Over the groups that were admitted at versions of which none can be trained any more."""

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        from asyncrl.extensions.bias.audit import Audit

        return Audit()


Own = Bias
