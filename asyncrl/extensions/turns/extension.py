"""What this folder adds: two advantage estimators."""

from __future__ import annotations

from asyncrl import extension


class Turns(extension.Extension):
    """Credit for turns."""

    advantages = {  # noqa: RUF012
        "turn_discounted": "asyncrl.extensions.turns.advantage:turn_discounted",
        "turn_loo": "asyncrl.extensions.turns.advantage:turn_loo",
    }


Own = Turns
