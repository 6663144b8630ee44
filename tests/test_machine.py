"""The machine's bound of asynchronous over synchronous throughput, and the figures it is based on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench_async import bound_line, machine_bound
from scripts.machine import Machine, described, overlap_bound, summary

SECONDS = st.floats(0.01, 100.0)


@pytest.mark.parametrize(
    ("generate", "train", "two_over_one", "bound"),
    [
        (1.0, 1.0, 2.0, 2.0),  # a core for each: all of one is hidden behind the other
        (3.0, 1.0, 2.0, 4 / 3),  # a step takes as long as its longer half
        (1.0, 3.0, 2.0, 4 / 3),
        (1.0, 1.0, 1.5, 1.5),  # shared units: the work of a step takes two thirds of its synchronous time
        (3.0, 1.0, 1.5, 4 / 3),  # here the longer half decides still
        (2.0, 2.0, 1.02, 1.02),
        (0.0, 1.0, 2.0, 1.0),  # nothing to hide
        (1.0, 1.0, 0.9, 1.0),  # noise, or a machine on which they had better take turns
        (1.0, 1.0, 2.1, 2.0),
    ],
)
def test_bound_follows_from_step_halves_and_the_rate_of_two(
    generate: float, train: float, two_over_one: float, bound: float
) -> None:
    assert overlap_bound(generate, train, two_over_one) == pytest.approx(bound)


@given(SECONDS, SECONDS, st.floats(1.0, 2.0))
def test_bound_is_between_one_and_the_rate_of_two(g: float, t: float, r: float) -> None:
    assert 1.0 - 1e-9 <= overlap_bound(g, t, r) <= r + 1e-9
    assert overlap_bound(g, t, r) == pytest.approx(overlap_bound(t, g, r))


@given(SECONDS, SECONDS, st.floats(1.0, 2.0), st.floats(0.0, 1.0))
def test_no_schedule_of_the_work_beats_the_bound(g: float, t: float, r: float, overlap: float) -> None:
    """Both run at r / 2 of their speed while they overlap, and at full speed alone."""
    together = overlap * min(g, t)  # seconds of each one's work that are done while the other is busy
    step = 2 * together / r + (g - together) + (t - together)
    assert (g + t) / step <= overlap_bound(g, t, r) + 1e-9


X86 = """\
processor\t: 0
model name\t: AMD EPYC 7B13
flags\t\t: fpu avx avx2 sha_ni

processor\t: 1
model name\t: another
flags\t\t: fpu avx2 avx512f avx512_bf16
"""


def test_cpu_is_described_by_name_and_features() -> None:
    assert described(X86) == ("AMD EPYC 7B13", ["avx2"])
    assert described("processor\t: 0\nFeatures\t: fp asimd bf16 sve\n")[1] == ["asimd", "sve", "bf16"]
    assert described("")[1] == []


def test_ratio_is_the_median_of_neighbouring_rounds() -> None:
    # another process took half of the machine in the second round, from both
    assert summary([50.0, 25.0, 50.0], [51.0, 25.5, 60.0]) == {
        "gflops_one": 50.0,
        "gflops_two": 51.0,
        "two_over_one": 1.02,
    }


def test_line_names_what_is_missing_and_a_busy_machine() -> None:
    rates = {"gflops_one": 50.0, "gflops_two": 51.0, "two_over_one": 1.02}
    line = Machine("AMD EPYC", 2, ["avx2"], "2.13.0", 0.99, **rates).line()
    assert "avx2, no bfloat16 arithmetic; torch 2.13.0" in line
    assert "50 GFLOP/s in one process, 51 in two (1.02 x)" in line
    assert "BUSY" not in line
    other = Machine("Xeon", 2, ["avx2", "amx_bf16"], "2.13.0", 0.4, **rates).line()
    assert "no bfloat16" not in other
    assert other.endswith("BUSY WITH OTHERS, a process ran 40% of the time")


def test_ratio_stands_beside_what_the_machine_allows() -> None:
    synchronous = {"generate_s": 2.0, "train_s": 3.0, "processes": 2.0}
    bound = machine_bound(synchronous, 1.02)
    assert bound == pytest.approx(1.02)
    line = bound_line(0.98, bound, synchronous, 1.02)
    assert "0.98; this machine allows 1.02 (" in line
    assert line.endswith("96% of that")


@pytest.mark.parametrize("processes", [0.0, 3.0])
def test_no_bound_is_claimed_where_it_does_not_hold(processes: float) -> None:
    synchronous = {"generate_s": 2.0, "train_s": 3.0, "processes": processes}
    assert machine_bound(synchronous, 1.5) is None
    assert "no bound" in bound_line(1.2, None, synchronous, 1.5)
