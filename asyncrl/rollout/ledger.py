"""The ledger: where every prompt, group, trajectory and token is, as two independent counts that must agree.

    prompts, groups, trajectories    issued = running + ready + training + trained + rejected, by reason
    tokens                           generated = running + held + trained + rejected + discarded

The left sides are counted at the source: prompts where they are drawn, groups and trajectories where they are admitted,
tokens where the client receives them. The right sides are what the groups themselves hold. The comparison therefore
detects whatever is lost between the two or counted twice.

A prompt has the state of the group that plays it. Exactly one group plays each prompt (a slot that is replayed takes
another prompt), so prompts and groups have the same states, except that a prompt that was drawn and reached no group is
issued and has no state. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.errors import LedgerError


@dataclass(frozen=True)
class StateCounts:
    """Counts of one kind of thing, by state."""

    issued: int = 0
    running: int = 0
    ready: int = 0
    training: int = 0
    trained: int = 0
    rejected: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(frozen=True)
class TokenCounts:
    """Counts of the tokens that engines generated for training, by state."""

    generated: int = 0
    running: int = 0  # of running groups
    held: int = 0  # of groups that are ready or in training
    trained: int = 0
    rejected: int = 0
    discarded: int = 0  # in no trajectory of their group: dropped turns, retried requests, late arrivals


@dataclass(frozen=True)
class SourceCounts:
    """Counts taken at the source, outside the buffer."""

    prompts: int  # drawn
    tokens: int  # received
    running: int  # of these, for running groups
    late: int  # of these, for groups that had ended
    evaluation: int = 0  # received for evaluation, not included in `tokens`
    reused: int = 0  # groups that the trainer reused, as it reports


@dataclass(frozen=True)
class EventCounts:
    """Counts that are not part of the balance."""

    requeued: int = 0  # slots replayed, with another prompt
    retried: dict[str, int] = field(default_factory=dict)  # requests continued after an interruption, by cause
    reused: int = 0  # groups that the trainer reused after their batch
    evaluation_tokens: int = 0  # generated for evaluation


@dataclass(frozen=True)
class Ledger:
    """All counts of a run at one instant."""

    prompts: StateCounts
    groups: StateCounts
    trajectories: StateCounts
    tokens: TokenCounts
    events: EventCounts = field(default_factory=EventCounts)

    def check(self) -> None:
        """Raise LedgerError with the first equation that does not hold, both of its sides and the difference."""
        for name in ("prompts", "groups", "trajectories"):
            places: StateCounts = getattr(self, name)
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
