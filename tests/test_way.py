"""One prompt's way, from its task to the published weights. The steps in docs/architecture.md name all of its files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import asyncrl
from tests.rollout.machinery import Timing, machinery

PACKAGE = Path(asyncrl.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
MOST_FILES, MOST_LINES = 44, 8_000
"""Lower them after a deletion, and never raise them."""
WIRING = {"rollout/__main__.py", "trainer/__main__.py"}
BESIDE = (
    "observability/",
    "rollout/ledger.py",
    "rollout/status.py",
    "rollout/events.py",
    "rollout/timelines.py",
)
"""What keeps the books of it, and tells what a batch waits for: nothing that is trained depends on them."""
GROUND = (
    "config/",
    "errors.py",
    "images.py",
    "network/",
    "retries.py",
    "extension.py",
    "lookup.py",
    "imports.py",
)


def way() -> set[str]:
    """Return the files that the steps name."""
    steps = PAGE.read_text().split("## Follow one prompt")[1].split("\n## ")[0]
    return set(re.findall(r"\(\.\./asyncrl/([\w/]+\.py)\)", steps)) - WIRING


def test_the_way_of_a_prompt_does_not_grow() -> None:
    files = way()
    assert len(files) <= MOST_FILES, sorted(files)
    assert sum(len((PACKAGE / file).read_text().splitlines()) for file in files) <= MOST_LINES


def test_what_runs_for_a_prompt_is_on_its_way() -> None:
    ran: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents:
            ran.add(str(file.relative_to(PACKAGE)))

    made = machinery(Timing(0, 5, None, "version", "in_place"), batch_groups=2, group_size=2, max_staleness=1)
    sys.setprofile(note)
    try:
        made.batches(2)
    finally:
        sys.setprofile(None)
    assert {"rollout/groups.py", "engine/session.py", "agents/single_turn.py"} <= ran
    assert sorted(file for file in ran - way() if not file.startswith((*BESIDE, *GROUND))) == []
