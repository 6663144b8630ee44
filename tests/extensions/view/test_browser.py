"""The page in a real browser shows what was recorded, follows a run that goes on, and executes nothing of a model's.

Console errors and violations of the content security policy fail every test.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tokenizers import Tokenizer, models

from asyncrl.extensions.recording.reader import Recording
from asyncrl.extensions.view.inspection.rows import rows_of
from asyncrl.images import image_name
from asyncrl.schema import Group, Trajectory, Turn
from scripts.synthetic_run import Plan, SyntheticRun, make
from tests.fakes import completion

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"

if BROWSER is None:
    pytest.skip("needs chromium (Debian: apt-get install chromium)", allow_module_level=True)
playwright = pytest.importorskip("playwright.sync_api")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a straggler, images and hostile texts; one that differs in a setting; one that goes on."""
    folder = tmp_path_factory.mktemp("browser")
    first = SyntheticRun(folder / "first", Plan(turns=2, slow_tool=3, config={"trainer": {"threads": 1}}))
    for _ in range(6):
        first.advance()
    file = io.BytesIO()
    Image.new("RGB", (28, 56), (200, 30, 30)).save(file, "PNG")
    name = image_name(file.getvalue())
    turn = Turn([5], completion(), images=[name])
    first.record(Group("g-seen", 99, [1], [Trajectory([turn], 1.0)], HOSTILE, None, [name], {name: file.getvalue()}))
    first.close()
    (folder / "first" / "warnings.jsonl").write_text(json.dumps({"version": 2, "warning": HOSTILE}) + "\n")
    vocabulary = {HOSTILE: 1} | {f" w{number}": number for number in range(300) if number != 1}
    model = folder / "model"
    model.mkdir()
    Tokenizer(models.WordLevel(vocabulary, unk_token=" w0")).save(str(model / "tokenizer.json"))
    (folder / "first" / "addresses.json").write_text(json.dumps({"model": str(model), "gpus": 0}))
    make(folder / "second", Plan(seed=1, config={"trainer": {"threads": 2}}))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def address(runs: Path, browser: Any) -> Iterator[str]:
    """The command serves the folder; this is the address that it prints. It ends quietly, though pages are open."""
    command = [sys.executable, "-m", "asyncrl.extensions.view.watch.cli", str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        assert served.stdout
        assert served.stderr
        try:
            address = served.stdout.readline().split()[-1]
            yield address
            browser.new_page().goto(address)  # follows events until the server ends
        finally:
            served.terminate()
        assert served.wait(60) in (0, -15)
        assert served.stderr.read() == ""


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1300, "height": 800})
    page = context.new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto(address)
    yield page
    assert told == []
    assert page.locator("[role=alert]").count() == 0
    assert page.title() != "owned"
    context.close()


def show(page: Any, **state: Any) -> None:
    wanted = "&".join(f"{name}={value}" for name, value in state.items())
    page.evaluate("hash => { location.hash = hash }", wanted)


def until(page: Any, expression: str, expected: Any, seconds: float = 60.0) -> None:
    """Wait for a value. Playwright's own wait_for_function evaluates texts in the page, which its policy forbids."""
    deadline = time.monotonic() + seconds
    while (found := page.evaluate(expression)) != expected:
        assert time.monotonic() < deadline, f"{expression} is {found!r}, not {expected!r}"
        time.sleep(0.02)


UIDS = "[...document.querySelectorAll('{}')].map(one => one.dataset.uid)"


def test_overview_charts_every_measure_without_the_token(page: Any) -> None:
    show(page, view="overview", run="first")
    page.wait_for_selector("figure canvas")
    titles = page.eval_on_selector_all("figure", "all => all.map(one => one.dataset.chart)")
    assert titles[:5] == [
        "Reward",
        "Held-out accuracy",
        "Answer length, tokens",
        "Staleness, versions",
        "Gap to engines, nats",
    ]
    assert "token" not in page.url
    page.wait_for_selector("text=document.title='owned'")  # the warning, as text


def test_runs_side_by_side_share_charts_and_differences(page: Any) -> None:
    show(page, view="overview", run="first")
    page.get_by_label("compare second").check()
    page.wait_for_selector("table.settings th:has-text('second')")
    rows = page.eval_on_selector_all("table.settings tbody tr", "all => all.map(one => one.innerText)")
    assert rows == ["trainer.threads\t1\t2"]
    lines = page.eval_on_selector_all("figure[data-chart=Reward] .key", "all => all.map(one => one.title)")
    assert [line.partition(":")[0] for line in lines] == ["first", "second"]
    assert [("threads=1" in line, "threads=2" in line) for line in lines] == [(True, False), (False, True)]
    assert "threads=2" in page.locator(".run:has-text('second') .differs").inner_text()
    assert page.evaluate("document.querySelector('figure[data-chart=Reward] .plot').chart.data.length") == 3


def test_episodes_show_the_recording_and_text_stays_text(page: Any, runs: Path) -> None:
    show(page, view="episodes", run="first", uid="g000009")
    page.wait_for_selector(".panel .token")
    recorded = Recording(runs / "first").group("g000009")
    tokens = page.eval_on_selector_all(
        ".panel .trajectory:first-of-type .token", "all => all.map(one => one.textContent)"
    )
    ids = [token for turn in recorded.trajectories[0].turns for token in turn.completion.token_ids]
    assert tokens == [HOSTILE if token == 1 else f" w{token}" for token in ids]
    assert page.locator(".prompt").inner_text().startswith(HOSTILE)
    assert page.locator("main script, main img[src=x]").count() == 0
    backgrounds = set()
    for colour in ("logprob", "gap", "version", "advantage"):
        page.get_by_label("colour of tokens").select_option(colour)
        backgrounds.add(page.eval_on_selector_all(".token", "all => all.map(one => one.style.background).join()"))
    assert len(backgrounds) == 4


def test_groups_are_listed_filtered_and_opened_by_keys(page: Any, runs: Path) -> None:
    groups, _ = rows_of(Recording(runs / "first"))
    show(page, view="episodes", run="first")
    until(page, "document.querySelectorAll('.group').length", len(groups))
    page.get_by_label("step").select_option("2")
    page.get_by_label("task", exact=True).select_option("sort")
    until(page, UIDS.format(".group"), ["g000011", "g000009"])
    page.locator(".list").focus()
    page.keyboard.press("j")
    page.wait_for_selector(".panel[data-uid=g000011]")
    page.keyboard.press("Escape")
    page.wait_for_selector(".panel", state="detached")


def test_question_is_shown_as_answered_first_and_last(page: Any) -> None:
    show(page, view="episodes", run="first", uid="g000009")
    page.get_by_text("same question in other batches").click()
    until(page, UIDS.format(".panel"), ["g000001", "g000021"])


def test_images_of_the_recording_are_shown(page: Any) -> None:
    show(page, view="episodes", run="first", uid="g-seen")
    until(page, "[...document.querySelectorAll('.panel img')].map(one => one.naturalHeight)", [56, 56])


def test_anatomy_marks_the_straggler_and_leads_to_its_episodes(page: Any) -> None:
    show(page, view="batches", run="first", step=3)
    page.wait_for_selector(".straggler:visible")
    told = page.locator(".straggler").inner_text()
    assert re.search(r"g000015, episode 3 \(sort\): 5\.\d of \d\.\d s in tool search", told)
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.straggler').innerText.includes('search')", False)
    assert "step=4" in page.url
    page.locator(".anatomy").click(position={"x": 200, "y": 120})
    page.wait_for_selector(".panel .token")  # the episode of the row that was clicked


def test_ten_thousand_episodes_are_drawn_as_viewed(page: Any, runs: Path) -> None:
    make(runs / "large", Plan(steps=1, groups=1250, siblings=8, turns=2, tokens=4))
    page.wait_for_selector(".run:has-text('large')", timeout=60_000)
    show(page, view="batches", run="large")
    drawn = "document.querySelector('.anatomy canvas').drawn?.rows"
    page.wait_for_selector("text=10000 episodes of 1250 groups")
    until(page, f"{drawn}?.[0]", 0)
    assert page.evaluate(f"{drawn}[1]") < 100
    page.evaluate("document.querySelector('.anatomy').scrollTop = 1e9")
    until(page, f"{drawn}[1]", 10_000)
    assert page.evaluate(f"{drawn}[0]") > 9900


def test_all_answers_of_a_group_are_shown(page: Any, runs: Path) -> None:
    make(runs / "wide", Plan(steps=1, groups=1, siblings=30))
    page.wait_for_selector(".run:has-text('wide')", timeout=60_000)
    show(page, view="episodes", run="wide", uid="g000000")
    until(page, "document.querySelectorAll('.panel .trajectory').length", 30)
    until(page, "document.querySelectorAll('.panel .trajectory:last-of-type .token').length", 12)
    assert page.locator(".group .rewards i").count() == 30
    assert page.evaluate("(all => all.scrollWidth <= all.clientWidth)(document.querySelector('.group .rewards'))")


def test_dead_run_shows_its_error_on_misleading_views(page: Any, runs: Path) -> None:
    """It dies while it is shown. Its settings that were overridden stand at the top."""
    folder = make(runs / "dying", Plan())
    page.wait_for_selector(".run:has-text('dying')", timeout=60_000)
    show(page, view="fleet", run="dying")
    page.wait_for_selector("text=Engines: 3 of 3 serve")
    (folder / "overrides.json").write_text(json.dumps({"names": ["experiment=tiny", "run.max_steps"]}))
    (folder / "logs").mkdir()
    (folder / "logs" / "rollout.log").write_text(f"Traceback (most recent call last):\n  ...\nKeyError: {HOSTILE}\n")
    error = {"state": "died", "error": f"rollout died: see {folder}/logs/rollout.log", "time": 0.0}
    (folder / "end.json").write_text(json.dumps(error))
    page.wait_for_selector("text=none serves any more", timeout=60_000)
    assert page.locator(".dot.serving").count() == 0
    for view in ("overview", "advice"):
        show(page, view=view, run="dying")
        page.wait_for_selector("[data-rule=died] pre:has-text('KeyError')")
    assert "died" in page.locator("#state").inner_text()
    show(page, view="overview", run="dying")
    page.wait_for_selector(".given:has-text('experiment=tiny')")
    assert page.locator(".given code").all_inner_texts() == ["experiment=tiny", "run.max_steps=6"]


def test_fleet_fits_the_page_and_lists_every_episode(page: Any, runs: Path) -> None:
    folder = make(runs / "broad", Plan())
    status = json.loads((folder / "status.json").read_text())
    for number, engine in enumerate(status["engines"]):
        engine |= {"url": f"http://node-{number}.cluster.example.org:30000", "longest": 4e5, "cache_hit": 0.123}
        engine |= {"preemptions": 12.0, "prefilled": 123456789.0, "prefill_seconds": 4321.0}
    phases = ("queued", "prefill", "decode", "tool", "environment", "reward", "waiting")
    waits = {"waits_for": "the tool 'search_in_the_documentation' of a server far away, call 17 of 20", "seconds": 12.0}
    episodes = [{"phase": phases[place % 7], **waits, "tokens": 31000} for place in range(32)]
    group = status["groups"][0] | {"task": "code_with_many_tests", "episodes": episodes}
    status["groups"] = [group | {"uid": f"g{number:09d}-with-a-name"} for number in range(4)]
    (folder / "status.json").write_text(json.dumps(status))
    page.set_viewport_size({"width": 1400, "height": 900})
    page.wait_for_selector(".run:has-text('broad')", timeout=60_000)
    show(page, view="fleet", run="broad")
    page.wait_for_selector("text=Engines: 3 of 3 serve")
    for part in ("main", ".scrolls"):
        wide = f"[...document.querySelectorAll('{part}')].filter(one => one.scrollWidth > one.clientWidth).length"
        assert page.evaluate(wide) == 0, part
    page.locator(".fleet details summary").first.click()
    assert page.locator(".fleet details[open] li").count() == 32
    (folder / "status.json").write_text(json.dumps(status | {"version": 77}))
    page.wait_for_selector(".cells:has-text('77')")
    assert page.locator(".fleet details[open] li").count() == 32  # it stays open


def test_fleet_and_advice_show_what_is_measured(page: Any) -> None:
    show(page, view="fleet", run="first")
    page.wait_for_selector("text=Engines: 3 of 3 serve")
    show(page, view="advice", run="first")
    page.wait_for_selector("article[data-rule=binding]")


def test_a_step_is_on_the_page_soon(page: Any, runs: Path) -> None:
    """Within a second or two: test_server.py holds how often the server looks, and a busy machine takes its time."""
    run = SyntheticRun(runs / "live", Plan(steps=9))
    run.advance()
    page.wait_for_selector("text=live", timeout=60_000)
    page.wait_for_selector(".run:has-text('live')", timeout=60_000)
    show(page, view="overview", run="live")
    page.wait_for_selector(".run:has-text('1 / 9')")
    began = time.monotonic()
    run.advance()
    page.wait_for_selector(".run:has-text('2 / 9')")
    until(page, "document.querySelector('figure[data-chart=Reward] .plot').chart.data[0].length", 2)
    assert time.monotonic() - began < 20
    show(page, view="batches", run="live")
    page.wait_for_selector("text=batch 1,", state="attached")
    run.advance()
    until(page, "document.querySelector('select[aria-label=batch]').value", "2")
    run.close()
