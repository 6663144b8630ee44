"""Gymnasium's toy text environments in words: their rules, the names of their actions, and their observations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Toy:
    """Description of one environment."""

    rules: str
    actions: tuple[str, ...]  # in the order of their numbers
    describe: Callable[[Any, Any], str]


def frozen_lake(env: Any, position: int) -> str:
    """Return the map, with @ at the player's position."""
    rows = [[cell.decode() for cell in row] for row in env.desc]
    return _with(rows, *divmod(int(position), len(rows[0])))


def cliff_walking(env: Any, position: int) -> str:
    """Return the map, with @ at the player's position."""
    height, width = env.shape
    rows = [["." for _ in range(width)] for _ in range(height - 1)]
    return _with([*rows, ["S", *"C" * (width - 2), "G"]], *divmod(int(position), width))


def taxi(env: Any, state: int) -> str:
    """Return the map, with @ at the taxi's position; the taxi can pass : but not |."""
    row, column, passenger, target = env.decode(int(state))
    rows = [[cell.decode() for cell in line] for line in env.desc]
    where = f"waits at {'RGYB'[passenger]}" if passenger < 4 else "is in the taxi"
    return f"{_with(rows, 1 + row, 1 + 2 * column)}\nThe passenger {where} and wants to go to {'RGYB'[target]}."


def blackjack(_: Any, seen: tuple[int, int, int]) -> str:
    """Return both hands, as far as they are visible."""
    total, dealer, ace = seen
    return f"You have {total}{', with an ace as 11' if ace else ''}. The dealer shows {dealer}."


def _with(rows: list[list[str]], row: int, column: int) -> str:
    rows[row][column] = "@"
    return "\n".join("".join(line) for line in rows)


def printed(_: Any, observation: Any) -> str:
    """Return the observation as Python prints it."""
    return str(observation)


NONE = Toy("", (), printed)
"""Description of all other environments."""
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
"""Descriptions by the first part of the environment's id."""
