"""A page of a run shows what was recorded, runs nothing of it, and asks nobody for anything."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console

from asyncrl.extensions.recording.events import Committed, Event, Rejected, packed, scored
from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.recording.writer import TRAINER, Writer
from asyncrl.extensions.view.inspection.cli import main
from asyncrl.extensions.view.inspection.page import page
from asyncrl.extensions.view.inspection.render import group_text
from asyncrl.extensions.view.inspection.rows import rows_of
from asyncrl.extensions.view.recording import ViewedRecording
from asyncrl.images import image_name
from asyncrl.rollout.events import Taken
from asyncrl.schema import Group, Trajectory, Turn
from tests.fakes import completion, group

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='owned'</script><!--<script>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A batch of two groups of two, of five tokens each, one group that the trainer ran; and a rejected one."""
    groups = [group(slot, rewards=(0, 1), tokens=5, versions=(0, 1)) for slot in range(3)]
    events: list[Event] = [Committed(slot, packed(groups[slot]), 0) for slot in (0, 1)]
    events += [Rejected(2, "no_signal", 4, packed(groups[2])), Taken(0, ["g0", "g1"], {})]
    for folder, told in ((tmp_path / "records", events), (tmp_path / "records" / TRAINER, [scored(0, SCORES)])):
        writer = Writer(folder)
        for event in told:
            writer.write(event)
        writer.close()
    metrics = {"step": 1, "loss": -0.5, "logprob_gap/mean": math.nan}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    return tmp_path


SCORES = [-0.25] * 10 + [math.nan] * 10


def made(run: Path, decode: Any = str) -> str:
    recording = ViewedRecording(run)
    rows, steps = rows_of(recording)
    return page("a <b>run</b>", recording, steps, rows, {1: {"loss": -0.5, "logprob_gap/mean": math.nan}}, decode)


def held(text: str) -> dict[str, Any]:
    """The data of a page."""
    (line,) = re.findall(r"^const data = (.*);$", text, re.MULTILINE)
    return json.loads(line)


def test_turns_tell_actors_and_unusual_predecessors(tmp_path: Path) -> None:
    """Both the page and the terminal show it."""
    turns = [
        Turn([], completion(), role="white"),
        Turn([3], completion(), role="black", begins=True),
        Turn([4], completion(), role="black"),
        Turn([5], completion(), role="black", begins=True),
        Turn([6], completion(), role="white", begins=True, fork=0),
        Turn([7], completion(), role="white", begins=True, fork=-1),
    ]
    expected = ["⟨white⟩", "⟨black: a context of its own⟩", "", "⟨a context of its own⟩"]
    expected += ["⟨white: again after turn 0⟩", "⟨again from the beginning⟩"]
    played = group(0, rewards=(0,))
    played = msgspec.structs.replace(played, trajectories=[Trajectory(turns, 1.0)])
    writer = Writer(tmp_path / "records")
    for event in (Committed(0, packed(played), 0), Taken(0, ["g0"], {})):
        writer.write(event)
    writer.close()
    (shown,) = held(made(tmp_path))["groups"]
    assert [turn["heading"] for turn in shown["trajectories"][0]["turns"]] == expected
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(group_text(played, str))
    text = console.export_text()
    places = [text.index(told) for told in expected if told]
    assert places == sorted(places)


def test_page_holds_every_token_with_its_logprob_gap_and_version(run: Path) -> None:
    data = held(made(run))
    (step,) = data["steps"]
    assert (step["reward"], step["length"], step["stalest"], step["loss"]) == (0.5, 5, 0, -0.5)
    assert "logprob_gap/mean" not in step  # no number
    first, second, lost = data["groups"]
    assert (first["place"], lost["place"]) == ("0", "no_signal")
    (turn,) = first["trajectories"][1]["turns"]
    assert turn["tokens"][:2] == [["0", -0.5, 0.25, 0, False], ["1", -0.5, 0.25, 0, False]]
    assert turn["tokens"][-1] == ["4", -0.5, 0.25, 1, False]
    for other in (second, lost):
        assert {token[2] for one in other["trajectories"] for t in one["turns"] for token in t["tokens"]} == {None}


def test_page_needs_nothing_and_what_models_write_stays_text(run: Path) -> None:
    text = made(run, decode=lambda token: HOSTILE)
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?:http|//)", text)
    assert text.count("</script>") == 2  # of the page itself
    assert "<!--" not in text
    assert held(text.replace("<\\!--", "<!--"))["groups"][0]["prompt"].startswith(HOSTILE)


def test_command_writes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "page.html"
    assert main([str(run), "--reason", "no_signal", "--html", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 1 batches, 1 of 3 groups\n"
    assert [one["uid"] for one in held(file.read_text())["groups"]] == ["g2"]


ACTIONS = """<script>
document.querySelector('details').open = true;
setTimeout(() => {
  document.querySelector('input[value=gap]').click();
  const tokens = [...document.querySelectorAll('.token')];
  const find = document.getElementById('find');
  document.body.dataset.backgrounds = JSON.stringify(tokens.slice(0, 1).map(one => one.style.background));
  find.value = 'no_signal'; find.dispatchEvent(new Event('input'));
  document.body.dataset.found = [...document.querySelectorAll('details')].map(one => one.dataset.uid).join();
}, 300);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium (Debian: apt-get install chromium)")
def test_browser_shows_it(run: Path, tmp_path: Path) -> None:
    """Curves, tokens and their colours, the search; and a hostile answer does nothing."""
    file = tmp_path / "shown.html"
    file.write_text(made(run, decode=lambda token: HOSTILE) + ACTIONS)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    command = [str(BROWSER), *options, f"--user-data-dir={tmp_path / 'profile'}", f"file://{file}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600).stdout
    assert "<title>a &lt;b&gt;run&lt;/b&gt;</title>" in shown
    assert shown.count("<figure data-chart=") == 4  # reward, length, staleness, loss: no more figures were given
    (backgrounds,) = re.findall(r'data-backgrounds="([^"]*)"', shown)
    assert "rgb" in backgrounds
    assert 'data-found="g2"' in shown


def test_images_are_shown_as_data_and_never_executed(tmp_path: Path) -> None:
    """A recording may come from elsewhere: whatever its images hold, they are pixels to the page."""
    comment, file = PngInfo(), io.BytesIO()
    comment.add_text("comment", "<img src=x onerror=alert(1)></script>")
    Image.new("RGB", (28, 56)).save(file, "PNG", pnginfo=comment)
    png = file.getvalue()
    name = image_name(png)
    turn = Turn([], completion(), images=[name])
    one = Group("g0", 0, [1], [Trajectory([turn], 1.0)], "t", None, [name], {name: png})
    writer = Writer(tmp_path / "records")
    writer.write(Committed(0, packed(one), 0), one.images)
    writer.write(Taken(0, ["g0"], {}))
    writer.close()
    text = made(tmp_path)
    data = held(text)
    assert data["images"] == {name: base64.b64encode(png).decode()}
    assert (data["groups"][0]["images"], data["groups"][0]["trajectories"][0]["turns"][0]["images"]) == ([name], [name])
    assert text.count(data["images"][name]) == 1
    assert "onerror" not in text
    assert "img-src data:" in text
    out = io.StringIO()
    Console(file=out, width=200).print(group_text(Recording(tmp_path).group("g0"), str))
    assert out.getvalue().count(f"⟨image {name[:8]}, 28 x 56⟩") == 2
