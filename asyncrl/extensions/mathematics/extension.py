"""What this folder adds: the reward `math`, and those for answers in a certain form."""

from __future__ import annotations

from asyncrl import extension


class Mathematics(extension.Extension):
    """Answers are compared by math_verify, or by their form."""

    rewards = {  # noqa: RUF012
        "math": "asyncrl.extensions.mathematics.math_reward:MathReward",
        "fuzzy": "asyncrl.extensions.mathematics.forms:FuzzyMatch",
        "choice": "asyncrl.extensions.mathematics.forms:ChoiceMatch",
        "boxed": "asyncrl.extensions.mathematics.forms:BoxedMatch",
        "format": "asyncrl.extensions.mathematics.forms:FormatMatch",
    }


Own = Mathematics
