"""asyncrl-inspect shows what was selected and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import visible
from asyncrl.extensions.recording.events import Committed, Event, Rejected, packed
from asyncrl.extensions.recording.writer import Writer
from asyncrl.extensions.view.inspection.cli import main
from asyncrl.models.catalog import resolve
from asyncrl.rollout.events import Admitted, Taken
from tests.fakes import group

ESC = "\x1b"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two batches of two groups, one group that was rejected, and one that is ready."""
    found: list[Event] = [Rejected(9, "no_signal", 4, packed(group(9, rewards=[0.0, 0.0])))]
    for slot, (tokens, rewards) in enumerate([(2, (0, 1)), (5, (1, 1)), (3, (0, 0.5)), (7, (0, 0)), (2, (0, 1))]):
        versions = (1,) if slot == 3 else (0, 1)
        played = group(slot, rewards=rewards, tokens=tokens, versions=versions, task="sum" if slot % 2 else "sort")
        found += [Admitted(slot, 0, 0, f"p{slot}", 2), Committed(slot, packed(played), 0)]
    found += [Taken(0, ["g0", "g1"], {}), Taken(1, ["g2", "g3"], {"tokens/generated": 20.0})]
    writer = Writer(tmp_path / "records")
    for event in found:
        writer.write(event)
    writer.close()
    metrics = [{"step": step, "loss": -0.5 * step, "logprob_gap/mean": 0.25} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def uids(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    return [json.loads(line)["uid"] for line in shown(capsys, *arguments, "--json").splitlines()]


def test_overview_has_a_line_per_batch(run: Path, capsys) -> None:
    lines = shown(capsys, run).splitlines()
    first, second = (next(line for line in lines if line.startswith(f"│ {step} ")) for step in (0, 1))
    assert cells(first) == ["0", "2", "0.750", "3.5", "0%", "0.0 ≤ 0", "-0.5000", "0.2500"]
    assert cells(second) == ["1", "2", "0.125", "5.0", "0%", "0.5 ≤ 1", "-1.0000", "0.2500"]
    assert lines[-1] == "groups: trained 4, no_signal 1, ready 1"


def test_adapters_of_roles_are_told(run: Path, capsys) -> None:
    past = {"every": 2, "keep": 1}
    roles = {"solver": {"adapter": "b", "past": None}, "old": {"adapter": "policy", "past": past}}
    (run / "config.json").write_text(json.dumps({"agents": {"roles": roles}}))
    assert shown(capsys, run).splitlines()[-1] == "adapters: solver b; old policy, past versions"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_groups_are_found_by_what_one_of_their_trajectories_is(run: Path, capsys) -> None:
    for arguments, expected in (
        (["--step", 1], ["g2", "g3"]),
        (["--reason", "no_signal"], ["g9"]),
        (["--reason", "ready"], ["g4"]),
        (["--task", "sum"], ["g1", "g3"]),
        (["--reward", "0.5"], ["g2"]),
        (["--reward", "0.5:"], ["g0", "g1", "g2", "g4"]),
        (["--length", "5:7", "--reward", ":0"], ["g3"]),
        (["--staleness", "1:"], ["g2"]),
        (["--uid", "g3"], ["g3"]),
        (["--uid", "g", "--limit", 2], ["g9", "g0"]),
    ):
        assert uids(capsys, run, *arguments) == expected, arguments


def test_text_shows_turns_versions_and_rewards(run: Path, capsys) -> None:
    (run / "addresses.json").write_text(json.dumps({"model": str(resolve("builtin:tiny"))}))
    text = shown(capsys, run, "--uid", "g1", "--text")
    assert "-- 0: reward 1, 5 tokens" in text
    assert "⟨v0⟩0123⟨v1⟩4⟨stop⟩" in text.replace(" ", "")


def test_a_trace_without_what_makes_it_is_refused_in_words(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "asyncrl.extensions.observe.perfetto", None)
    assert main([str(run), "--trace", str(run / "trace.json")]) == 1
    assert "--trace needs the extension `observe`" in capsys.readouterr().err


def test_foreign_text_does_not_steer_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "asyncrl.extensions.view.inspection.render.decoder", lambda run: lambda token: visible("\x1b]0;owned\x07")
    )
    steering = f"{ESC}[2J[red]"
    writer = Writer(run / "records")
    writer.write(Rejected(20, steering, 4, packed(group(20, rewards=[0.0], task=steering))))
    writer.close()
    for arguments in ([], ["--reason", steering], ["--uid", "g20", "--text"]):
        text = shown(capsys, run, *arguments)
        assert r"\x1b" in text
        assert not set("\x1b\x07") & set(text)


def test_json_has_all_that_was_recorded_of_a_group(run: Path, capsys) -> None:
    (line,) = shown(capsys, run, "--uid", "g1", "--text", "--json").splitlines()
    found = json.loads(line)
    assert (found["rewards"], found["lengths"], found["place"], found["staleness"]) == ([1, 1], [5, 5], "0", [0, 0])
    assert found["group"][3][0][0][0][1][0] == [0, 1, 2, 3, 4]


def test_mistakes_are_told_in_a_line(tmp_path: Path, capsys) -> None:
    assert main([str(tmp_path)]) == 1
    assert "was it made with record=true?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--reward", "high"])
    assert "write 0.5:1" in capsys.readouterr().err


def _fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "settings that are a list": ("config.json", lambda path: path.write_text("[1]"), "it is no object"),
    "settings with a list": ("config.json", lambda path: path.write_text('{"agents": [1]}'), "agents: got [1]"),
    "a role that is a list": (
        "config.json",
        lambda path: path.write_text('{"agents": {"roles": {"a": [1]}}}'),
        "agents.roles.a: got [1]",
    ),
    "settings nested without end": (
        "config.json",
        lambda path: path.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        "config.json is damaged",
    ),
    "a FIFO for the settings": ("config.json", _fifo, "no regular file"),
    "a FIFO for the metrics": ("metrics.jsonl", _fifo, "no regular file"),
    "a FIFO for the recording": ("records/000000.frames", _fifo, "no regular file"),
    "a FIFO for the index": ("records/index.jsonl", _fifo, "no regular file"),
    "a line that is a list": ("metrics.jsonl", lambda path: path.write_text("[1]\n"), "line 1 is damaged"),
    "a line without a step": ("metrics.jsonl", lambda path: path.write_text('{"loss": 1}\n'), "line 1 has no step"),
    "a step that is none": ("metrics.jsonl", lambda path: path.write_text('{"step": NaN}\n'), "line 1 has no step"),
    "addresses that are a list": ("addresses.json", lambda path: path.write_text("[1]"), "it is no object"),
    "a FIFO for the addresses": ("addresses.json", _fifo, "no regular file"),
    "a tokenizer that is none": (
        "tokenizer.json",
        lambda path: (path.write_text("[]"), path.with_name("addresses.json").write_text(_model(path.parent))),
        "tokenizer.json: it is no tokenizer",
    ),
}


def _model(folder: Path) -> str:
    return json.dumps({"model": str(folder)})


@pytest.mark.parametrize("kind", BAD)
def test_damaged_files_are_told_in_a_line_with_their_name(
    kind: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, harm, reason = BAD[kind]
    harm(run / name)
    codes = [main([str(run), *options]) for options in ([], ["--text"], ["--html", str(run / "page.html")])]
    lines = capsys.readouterr().err.splitlines()
    assert 1 in codes
    assert all(line.startswith("asyncrl-inspect: ") and reason in line for line in lines), lines


def test_text_for_a_figure_is_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": "high", "logprob_gap/mean": 0.25}\n')
    first = next(line for line in shown(capsys, run).splitlines() if line.startswith("│ 0 "))
    assert cells(first)[-2:] == ["", "0.2500"]
