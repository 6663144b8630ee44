"""The ledger: where every prompt, group, trajectory and token is, as two counts that must agree.

    prompts, groups, trajectories    issued = running + ready + training + trained + rejected, by reason
    tokens                           generated = running + held + trained + rejected + discarded

The left sides are counted where things come from: prompts where they are drawn, groups and trajectories where they are
admitted, tokens where the client receives them. The right sides are what the groups themselves hold. So whatever is
lost between the two, or stands twice, is seen.

A prompt is where the group is that plays it: each is played by exactly one (a slot that is played anew takes another
prompt), so prompts and groups have the same places, but a prompt that was drawn and reached no group is issued and
nowhere. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.errors import LedgerError


@dataclass(frozen=True)
class Places:
    """Where all things of one kind are."""

    issued: int = 0
    running: int = 0
    ready: int = 0
    training: int = 0
    trained: int = 0
    rejected: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(frozen=True)
class Tokens:
    """Where all tokens are that engines wrote for training."""

    generated: int = 0
    running: int = 0  # of groups that are being played
    held: int = 0  # of groups that are ready or in training
    trained: int = 0
    rejected: int = 0
    discarded: int = 0  # in no trajectory of their group: turns thrown away, requests asked anew, come too late


@dataclass(frozen=True)
class Source:
    """What is counted where it comes from, outside of the buffer."""

    prompts: int  # drawn
    tokens: int  # received
    running: int  # of these, for groups that are being played
    late: int  # of these, for groups that had ended
    evaluation: int = 0  # received for evaluation, and not among these
    reused: int = 0  # groups that the trainer took again, as it tells


@dataclass(frozen=True)
class Events:
    """Counted beside the balance."""

    requeued: int = 0  # slots played anew, with another prompt
    retried: dict[str, int] = field(default_factory=dict)  # requests asked anew, by cause
    reused: int = 0  # groups that the trainer took again after their batch
    evaluation_tokens: int = 0  # written for evaluation


@dataclass(frozen=True)
class Ledger:
    """The books of a run at one instant."""

    prompts: Places
    groups: Places
    trajectories: Places
    tokens: Tokens
    events: Events = field(default_factory=Events)

    def check(self) -> None:
        """Raises LedgerError with the first equation that does not hold, both of its sides and the difference."""
        for name in ("prompts", "groups", "trajectories"):
            places: Places = getattr(self, name)
            parts = {
                "running": places.running,
                "ready": places.ready,
                "training": places.training,
                "trained": places.trained,
                **{f"rejected ({reason})": count for reason, count in places.rejected.items()},
            }
            _equal(name, "issued", places.issued, parts)
        tokens = self.tokens
        parts = {
            "running": tokens.running,
            "held": tokens.held,
            "trained": tokens.trained,
            "rejected": tokens.rejected,
            "discarded": tokens.discarded,
        }
        _equal("tokens", "generated", tokens.generated, parts)


def _equal(name: str, source: str, counted: int, parts: dict[str, int]) -> None:
    placed = sum(parts.values())
    if counted == placed:
        return
    terms = " + ".join(f"{part} {count}" for part, count in parts.items())
    difference = f"{counted - placed} lost" if counted > placed else f"{placed - counted} counted twice"
    raise LedgerError(
        f"the ledger of {name} does not balance: {source} {counted}, but {terms} = {placed}: {difference}"
    )
