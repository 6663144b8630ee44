"""The turns of an episode: the context of each (its parent turn of the same role, its share, and the tokens before it).

    P | a o b o c        the trunk, turns 0 1 2             parent -1 0 1    share 1 1/2 1/2
    P a o | d o e        turns 3 4, turn 3 forks after 0    parent  0 3      share 1/2 1/2

Turns 1 and 3 were written in the same context: P a o. Equal contexts are found by a hash of their token ids, so that
the division of an episode into samples does not matter. Sums along the branches are in branches.py.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import blake2b

from asyncrl.schema import Trajectory


@dataclass(frozen=True)
class TurnContext:
    """The context of one turn."""

    after: int  # the previous turn of its role on its branch, -1: none
    parent: int  # the same, skipping turns that wrote nothing: no token belongs to these
    share: float  # 1, or its fraction of the episode if that has several branches
    context: tuple[bytes, int]  # hash of the token ids before it, and how often its branch has had this context before
    state: str | bytes  # named by the environment, or the hash of the context


def turn_contexts(trajectory: Trajectory, prompt_ids: list[int]) -> list[TurnContext]:
    """Return the context of every turn, in order."""
    turns, parents, shares = trajectory.turns, trajectory.parents(), trajectory.shares()
    contexts, found = _contexts(trajectory, prompt_ids), list[TurnContext]()
    met: set[tuple[str, bytes]] = set()
    for place, turn in enumerate(turns):
        after = parents[place]
        while after >= 0 and turns[after].role != turn.role:
            after = parents[after]
        parent = after if after < 0 or turns[after].completion.token_ids else found[after].parent
        context = contexts[place]
        again = _times(context, after, contexts, found) if (turn.role, context) in met else 0
        met.add((turn.role, context))
        found.append(TurnContext(after, parent, shares[place], (context, again), turn.state or context))
    return found


def _times(context: bytes, place: int, contexts: list[bytes], found: list[TurnContext]) -> int:
    """Count how often a context occurs on the path from the turn `place` upwards."""
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
