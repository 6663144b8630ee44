"""`make history` fails for a figure that leaves its band on either side, and for nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from scripts import history

RUNS = [
    {
        "reward/mean": [0.1 + 0.01 * seed, 0.2, 0.3, 0.4, 0.5],
        "logprob_gap/mean": [0.01] * 5,
        "staleness/mean": [0.5, 1.0 + 0.1 * seed, 1.0, 1.0, 1.0],
        "step/work": [40.0] * 4 + [50.0 + seed],
        "accuracy/before": [0.1],
        "accuracy/after": [0.5],
    }
    for seed in range(3)
]
BANDS = history.bands(RUNS)
POINTS = [(name, number) for name, band in BANDS.items() for number in range(len(band))]


@pytest.mark.parametrize("run", RUNS)
def test_recorded_runs_are_in_their_bands(run: history.Curve) -> None:
    assert history.outside(run, BANDS) == []


@pytest.mark.parametrize(("name", "number"), POINTS)
@pytest.mark.parametrize("side", ["below", "above", "no number"])
def test_each_point_fails_on_either_side(name: str, number: int, side: str) -> None:
    low, high = BANDS[name][number]
    value = {"below": low - 1e-6, "above": high + 1e-6, "no number": math.nan}[side]
    points = {one: list(values) for one, values in RUNS[0].items()}
    points[name][number] = value
    (line,) = history.outside(points, BANDS)
    assert line.startswith(name)
    if side != "no number":
        assert side in line
    points[name][number] = (low + high) / 2
    assert history.outside(points, BANDS) == []


def test_a_figure_that_one_side_lacks_is_an_error() -> None:
    run = dict(RUNS[0])
    del run["accuracy/after"]
    assert len(history.outside(run, BANDS)) == 1
    assert len(history.outside({**RUNS[0], "new": [1.0]}, BANDS)) == 1
    assert len(history.outside({**RUNS[0], "reward/mean": [0.1]}, BANDS)) == 1


def test_a_slow_machine_is_not_a_slow_program(tmp_path: Path) -> None:
    """Twice the time of a step at half the rate is the same figure."""
    found = []
    for slower in (1, 2):
        folder = tmp_path / str(slower)
        folder.mkdir()
        step = {"reward/mean": 0.5, "logprob_gap/mean": 0.01, "staleness/mean": 1.0, "time/step": 0.25 * slower}
        (folder / "metrics.jsonl").write_text(f"{json.dumps(step)}\n" * 12)
        (folder / "summary.json").write_text(json.dumps({"accuracy/before": 0.1, "accuracy/after": 0.5}))
        (folder / "rate.json").write_text(json.dumps(100.0 / slower))
        found.append(history.curve(folder))
    assert found[0] == found[1]
    assert found[0]["step/work"] == [25.0] * history.PARTS


def test_every_figure_of_an_experiment_has_a_band() -> None:
    for entry in json.loads(history.FILE.read_text()).values():
        assert entry["bands"].keys() == history.MARGINS.keys()
        assert {name: len(band) for name, band in entry["bands"].items()} == {
            name: 1 if name.startswith("accuracy") else history.PARTS for name in history.MARGINS
        }
        assert all(0 <= low < high for band in entry["bands"].values() for low, high in band)
