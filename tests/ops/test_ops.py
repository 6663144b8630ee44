"""The files of ops/ are what their scripts make, and Prometheus' own tools accept them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from asyncrl.extensions.observe.exposition import exposed
from asyncrl.metrics import fields
from tests.ops.programs import found

OPS = Path(__file__).parents[2] / "ops"


def test_board_is_what_its_script_makes() -> None:
    board = pytest.importorskip("ops.grafana.board", reason="grafana-foundation-sdk is not installed")
    assert (OPS / "grafana" / "board.json").read_text() == board.rendered()
    panels = [one for one in json.loads(board.rendered())["panels"] if one["type"] != "row"]
    plots = [plot for row in board.ROWS.values() for plot in row]
    assert [panel["title"] for panel in panels] == [plot.title for plot in plots]
    for panel, plot in zip(panels, plots, strict=True):
        assert [one["expr"] for one in panel["targets"]] == [query.expression for query in plot.queries]


@pytest.mark.parametrize("file", ["prometheus/alerts.yml", "grafana/board.json"])
def test_steps_that_are_asked_for_are_fields_of_the_steps(file: str) -> None:
    documented = fields.of_steps()
    names = {exposed(re.sub("[<>]", "", field))[0] for field in documented}
    asked = set(re.findall(r"asyncrl_step_(\w+)", (OPS / file).read_text()))
    assert asked <= names
    assert len(asked) > 4


def test_alerts_are_valid_and_fire_when_they_should() -> None:
    """alerts_test.yml states series and the alerts that follow from them."""
    promtool = found("promtool")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *command], cwd=OPS / "prometheus", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
