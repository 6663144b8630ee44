"""gymnasium's toy text in words: what its environments are about, what their actions are called, what is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Toy:
    """One of them."""

    rules: str
    actions: tuple[str, ...]  # in the order of their numbers
    describe: Callable[[Any, Any], str]


def frozen_lake(env: Any, position: int) -> str:
    """The map, with @ where the player stands."""
    rows = [[cell.decode() for cell in row] for row in env.desc]
    return _with(rows, *divmod(int(position), len(rows[0])))


def cliff_walking(env: Any, position: int) -> str:
    """The same."""
    height, width = env.shape
    rows = [["." for _ in range(width)] for _ in range(height - 1)]
    return _with([*rows, ["S", *"C" * (width - 2), "G"]], *divmod(int(position), width))


def taxi(env: Any, state: int) -> str:
    """The map, with @ where the taxi is; it passes : and not |."""
    row, column, passenger, target = env.decode(int(state))
    rows = [[cell.decode() for cell in line] for line in env.desc]
    where = f"waits at {'RGYB'[passenger]}" if passenger < 4 else "is in the taxi"
    return f"{_with(rows, 1 + row, 1 + 2 * column)}\nThe passenger {where} and wants to go to {'RGYB'[target]}."


def blackjack(_: Any, seen: tuple[int, int, int]) -> str:
    """Both hands, as far as they are seen."""
    total, dealer, ace = seen
    return f"You have {total}{', with an ace as 11' if ace else ''}. The dealer shows {dealer}."


def _with(rows: list[list[str]], row: int, column: int) -> str:
    rows[row][column] = "@"
    return "\n".join("".join(line) for line in rows)


def printed(_: Any, observation: Any) -> str:
    """As Python prints it."""
    return str(observation)


NONE = Toy("", (), printed)
"""Of what is none of them."""
TOYS = {
    "FrozenLake": Toy(
        "You are @ on a frozen lake. Walk over F to G, and not into a hole, H.",
        ("left", "down", "right", "up"),
        frozen_lake,
    ),
    "CliffWalking": Toy(
        "You are @. Walk to G, and not over the cliff, C: from there you are sent back to the start.",
        ("up", "right", "down", "left"),
        cliff_walking,
    ),
    "Taxi": Toy(
        "You drive the taxi @. Fetch the passenger, and drop them where they want to go.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        taxi,
    ),
    "Blackjack": Toy("You play Blackjack: come close to 21, and not over it.", ("stick", "hit"), blackjack),
}
"""By the first part of their ids."""
