"""A run goes on with another number of processes, some of which die."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.schema import Batch
from tests.examples import examples
from tests.extensions.processes.machinery import Deaths, ManyProcesses
from tests.rollout.chain import goes_on
from tests.rollout.machinery import Machinery


def several(processes: int) -> dict[str, Any]:
    """Settings of the machinery with so many processes."""
    return {"kind": ManyProcesses, "processes": processes} if processes > 1 else {}


@settings(deadline=None, max_examples=examples(12))
@given(
    seed=st.integers(0, 2**32),
    stop=st.integers(1, 4),
    slack=st.integers(0, 2),
    running=st.sampled_from([None, 2]),
    processes=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    deaths=st.booleans(),
)
def test_run_goes_on_with_another_number_of_processes(
    seed: int, stop: int, slack: int, running: int | None, processes: tuple[int, int], deaths: bool
) -> None:
    def after(made: Machinery, end: int) -> Callable[[Batch], None]:
        if not deaths or not isinstance(made, ManyProcesses):
            return lambda batch: None
        return Deaths(made, random.Random(seed), end).after

    more = several(processes[0]), several(processes[1])
    goes_on(seed, stop, slack, running, more, after, dying=deaths)
