"""A gap that grows is told once, and again when it has grown as much again; a steady one never."""

from __future__ import annotations

from pathlib import Path

from asyncrl import lookup
from asyncrl.extensions.observe.gap import WINDOW, GapWatch
from asyncrl.schema import Batch
from tests.fakes import tiny_config

BATCH = Batch(0, [], {})


def told(gaps: list[float]) -> list[int]:
    """Versions at which the watch warned."""
    found: list[int] = []
    watch = GapWatch(lambda _, version: found.append(version))
    for version, gap in enumerate(gaps, 1):
        watch.write({"version": version, "tokens/trained": 0.0 if gap < 0 else 8.0, "logprob_gap/mean": gap}, BATCH)
    return found


def test_a_gap_that_grows_is_told_once_for_every_tripling() -> None:
    first, second = WINDOW, 2 * WINDOW
    versions = told([0.05] * first + [0.2] * first + [0.7] * first)
    assert len(versions) == 2
    assert first < versions[0] <= second < versions[1]


def test_steady_small_and_absent_gaps_are_not_told() -> None:
    assert told([0.05] * 5 * WINDOW) == []
    assert told([1e-6] * WINDOW + [0.05] * WINDOW) == []  # float32: a thousandfold, and next to nothing
    assert told([-1.0] * WINDOW + [0.3] * WINDOW) == []  # nothing was trained at first


def test_one_bad_step_is_not_a_drift() -> None:
    assert told([0.05] * WINDOW + [1.5] + [0.05] * WINDOW) == []


def test_steps_on_what_no_engine_wrote_are_ignored() -> None:
    GapWatch(lambda *_: None).write({"version": 1, "tokens/trained": 8.0}, BATCH)
    GapWatch(lambda *_: None).write({"version": 1}, BATCH)  # mode=rollout_only


def test_every_run_is_watched(tmp_path: Path) -> None:
    found = lookup.step_listeners(tiny_config(), tmp_path, tmp_path, lambda *_: None)
    assert [one for one in found if isinstance(one, GapWatch)]
