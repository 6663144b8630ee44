"""The probe's rates: measured once for each machine, library and shape, and what is chosen by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.extensions.cpu import probe
from asyncrl.extensions.cpu.probe import Rates

RATES = Rates("host", "cpu", {"bfloat16": 5e9, "float32": 6e10}, {"bfloat16": 9e10, "float32": 6e10}, 2, 1.9)


def test_faster_format_may_differ_between_both_sides() -> None:
    assert RATES.faster("trainer") == "float32"
    assert RATES.faster("engine") == "bfloat16"
    assert RATES.slowdown("trainer", "bfloat16") == pytest.approx(12)
    assert RATES.slowdown("trainer", "float32") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({**json.loads(RATES.line()), "train": {"bfloat16": 1.0}}),
        json.dumps({**json.loads(RATES.line()), "train": {"bfloat16": 0.0, "float32": 1.0}}),
        json.dumps({**json.loads(RATES.line()), "two": None}),
    ],
)
def test_what_are_no_rates_is_refused_as_a_value(text: str) -> None:
    with pytest.raises(ValueError):
        Rates.parse(text)


def test_rates_survive_the_wire() -> None:
    assert Rates.parse(RATES.line()) == RATES


def test_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    calls: list[tuple[int, int]] = []

    def measure(hidden: int, inner: int) -> Rates:
        calls.append((hidden, inner))
        return RATES

    monkeypatch.setattr(probe, "measure", measure)
    assert probe.cached(64, 128) is None
    assert probe.rates(64, 128) == probe.rates(64, 128) == RATES
    assert calls == [(64, 128)]
    assert probe.cached(64, 128) == RATES
    assert probe.cached(64, 256) is None


@pytest.mark.parametrize("switch", probe.SWITCHES)
def test_hidden_instructions_and_another_cpu_are_another_machine(
    switch: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "measure", lambda *_: RATES)
    monkeypatch.delenv(switch, raising=False)  # the tests themselves may run with instructions hidden
    probe.rates(64, 128)
    monkeypatch.setenv(switch, "AVX2")
    assert probe.cached(64, 128) is None
    monkeypatch.delenv(switch)
    assert probe.cached(64, 128) == RATES
    monkeypatch.setattr(probe, "_cpu_field", lambda name: "another")
    assert probe.cached(64, 128) is None


def test_damaged_cache_is_measured_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path))
    monkeypatch.setattr(probe, "measure", lambda *_: RATES)
    probe.rates(64, 128)
    (file,) = (tmp_path / "rates").iterdir()
    file.write_text("cut sho")
    assert probe.cached(64, 128) is None
    assert probe.rates(64, 128) == RATES
    assert probe.cached(64, 128) == RATES


def test_cache_that_cannot_be_written_costs_only_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASYNCRL_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(probe, "measure", lambda *_: RATES)
    assert probe.rates(64, 128) == RATES
    assert "cannot save the measured rates" in capsys.readouterr().err


def test_large_weights_are_shortened_small_ones_are_original() -> None:
    assert probe.shortened(576, 1536) == (576, 1536)
    hidden, inner = probe.shortened(8192, 28672)
    assert hidden * inner == pytest.approx(probe.LARGEST, rel=0.01)
    assert inner / hidden == pytest.approx(3.5, rel=0.01)


def test_program_prints_real_rates_beside_other_output(tmp_path: Path) -> None:
    env = {**os.environ, "ASYNCRL_CACHE": str(tmp_path), "ASYNCRL_NODE": "node7"}
    command = [sys.executable, "-m", "asyncrl.extensions.cpu.probe", "64x96"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(probe.MARK)]
    shape, node, text = line.removeprefix(probe.MARK).split(" ", 2)
    rates = Rates.parse(text)
    assert (shape, node) == ("64x96", "node7")
    assert 1e7 < rates.train["float32"] < 1e13  # operations per second of one core
    assert 1 <= rates.two <= 2
    assert rates.cores >= 1
