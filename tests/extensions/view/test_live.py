"""The live view of a run on a terminal."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from asyncrl.extensions.view import live
from tests.metrics.screen import Screen, append, lacks, record


def drawn(screen: Screen) -> list[str]:
    """Return the lines of the last picture, without control sequences."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.out.getvalue()).replace("\r", "")
    return plain[plain.rindex("progress") :].splitlines()


def test_terminal_gets_a_live_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REFRESH_SECONDS", 0.0)
    screen = Screen(tmp_path, terminal="xterm")
    screen.console.opening()
    append(tmp_path / "metrics.jsonl", record(1, **{"reward/mean": 0.0}) + record(2, **{"reward/mean": 0.75}))
    append(tmp_path / "warnings.jsonl", json.dumps({"version": 1, "warning": "\x1b]0;title\x07 [red]"}) + "\n")
    line = {"set": "copy3", "version_min": 1, "version_max": 2, "accuracy": 0.25, "questions": 9, "failed": 0}
    append(tmp_path / "eval.jsonl", json.dumps(line | {"skipped": 0}) + "\n")
    engine = {"state": "serving", "running": 3, "waiting": 1, "used": 500, "capacity": 1000, "tokens_per_s": 80.0}
    state = {
        "episodes": {"tool": 1, "decode": 12},
        "ledger": {"groups": {"running": 4, "ready": 2}},
        "holding": True,
        "waiting_for": "x",
        "engines": [engine, {"state": "silent"}],
    }
    (tmp_path / "status.json").write_text(json.dumps(state))
    screen.console.follow()
    found = drawn(screen)
    shown = (
        ("progress", "2/200", "━", "6:36"),
        ("reward", "0.750", "▁█", "0.250", "version 2"),
        ("step", "2.0 s", "wait 0.5 train 0.5 publish 0.5", "32 samples/s", "0.5≤2", "gap 0.500"),
        ("episodes", "12 decode, 1 tool", "4 groups running", "2 ready", "publish"),
        ("engines", "1 of 2", "3 requests", "1 queued", "80 tokens/s", "50 %"),
        ("warnings", "1", "warnings.jsonl"),
    )
    assert [lacks(line, *values) for line, values in zip(found, shown, strict=False)] == [[]] * 6
    assert max(map(len, found)) <= 100
    assert "\x1b]" not in screen.out.getvalue()
    assert "version 1: \\x1b]0;title\\x07 [red]" in screen.out.getvalue()  # above the view
    os.utime(tmp_path / "status.json", (0, 0))
    screen.console.follow()
    assert "episodes" not in "".join(drawn(screen))  # the rollout process has ended
    append(tmp_path / "metrics.jsonl", record(3, **{"step/bad": 1.0}))
    screen.console.end()
    assert "bad step" in drawn(screen)[2]
    length = len(screen.out.getvalue())
    screen.console.follow()
    screen.console.end()
    assert len(screen.out.getvalue()) == length


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [([], 9, ""), ([1.0], 9, "▁"), ([0.0, 0.5, 1.0], 9, "▁▅█"), ([5.0, 0.0, 1.0], 2, "▁█"), ([2.0, 2.0], 9, "▁▁")],
)
def test_sparkline_spans_its_height(values: list[float], width: int, bars: str) -> None:
    assert live.sparkline(values, width) == bars
