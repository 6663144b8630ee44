"""Where each turn of a trajectory stands: after which turn of its role, with which share, and in which context.

    P | a o b o c        the trunk, turns 0 1 2            parent -1 0 1    share 1 1/2 1/2
    P a o | d o e        turns 3 4, turn 3 forks behind 0  parent  0 3      share 1/2 1/2

Turns 1 and 3 were written in one context: P a o. Equal contexts are found by a hash of their token ids, so that it does
not matter into which samples an episode is cut.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

from asyncrl.types import Trajectory


@dataclass(frozen=True)
class Place:
    """Of one turn."""

    after: int  # the turn of its role before it, on the way that leads to it, -1: none
    parent: int  # the same, without turns that wrote nothing: no token holds these
    share: float  # 1, or its part of it where the episode goes on in several ways
    context: tuple[bytes, int]  # hash of the token ids it follows, and how often its way has met them before
    state: str | bytes  # the environment's, or the hash of the context


def places(trajectory: Trajectory, prompt_ids: list[int]) -> list[Place]:
    """Of all turns, in their order."""
    turns, parents, shares = trajectory.turns, trajectory.parents(), trajectory.shares()
    contexts, found = _contexts(trajectory, prompt_ids), list[Place]()
    met: set[tuple[str, bytes]] = set()
    for place, turn in enumerate(turns):
        after = parents[place]
        while after >= 0 and turns[after].role != turn.role:
            after = parents[after]
        parent = after if after < 0 or turns[after].completion.token_ids else found[after].parent
        context = contexts[place]
        again = _times(context, after, contexts, found) if (turn.role, context) in met else 0
        met.add((turn.role, context))
        found.append(Place(after, parent, shares[place], (context, again), turn.state or context))
    return found


def _times(context: bytes, place: int, contexts: list[bytes], found: list[Place]) -> int:
    """How often it is met on the way up from there."""
    times = 0
    while place >= 0:
        times += contexts[place] == context
        place = found[place].after
    return times


def _contexts(trajectory: Trajectory, prompt_ids: list[int]) -> list[bytes]:
    found = [b""] * len(trajectory.turns)
    for sample in trajectory.samples():
        context = blake2b(b"" if sample[0][1].begins else _bytes(prompt_ids), digest_size=16)
        for place, turn in sample:
            context.update(_bytes(turn.observation))
            found[place] = context.digest()
            context.update(_bytes(turn.completion.token_ids))
    return found


def _bytes(token_ids: list[int]) -> bytes:
    return array("i", token_ids).tobytes()
