"""What this folder adds: three advantage estimators."""

from __future__ import annotations

from asyncrl import extension


class Turns(extension.Extension):
    """Credit for turns."""

    advantages = {  # noqa: RUF012
        "grpo_turn": "asyncrl.extensions.turns.advantage:grpo_turn",
        "turn_discounted": "asyncrl.extensions.turns.advantage:turn_discounted",
        "turn_loo": "asyncrl.extensions.turns.advantage:turn_loo",
    }


Own = Turns
