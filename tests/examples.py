"""Number of examples of a property test: few in `make unit`, many in `make campaign`."""

import os

TRIALS = int(os.environ.get("ASYNCRL_TRIALS", "1"))


def examples(number: int) -> int:
    """`number` of them, times ASYNCRL_TRIALS where it is set."""
    return number * TRIALS
