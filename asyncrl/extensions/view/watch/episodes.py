"""Groups of a recording, searched and paged. A recording may hold gigabytes: it is scanned in slices of SCAN_SECONDS,
one for each request, and a batch that is asked for before the scan has reached it is read by itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from asyncrl.errors import RecordError
from asyncrl.extensions.recording.events import Committed, packed
from asyncrl.extensions.recording.frames import FramePosition
from asyncrl.extensions.recording.reader import images_of
from asyncrl.extensions.view.inspection import render
from asyncrl.extensions.view.inspection.page import group_content
from asyncrl.extensions.view.inspection.rows import GroupFilter, GroupRow, RecordedRows
from asyncrl.extensions.view.recording import ViewedRecording
from asyncrl.rollout.events import Taken

SCAN_SECONDS, SEARCH_SECONDS = 0.5, 0.5
"""Time of a request that may be spent on the scan, and on the search."""


@dataclass(frozen=True)
class GroupPage:
    """Some of the groups that were asked for, the newest first."""

    rows: list[GroupRow]
    cursor: int | None
    """Where the next page begins; None after the last."""
    scanned: float
    """Share of the recording that was searched so far."""


class EpisodeIndex:
    """The groups of one recording. Raises RecordError if there is none."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._open()

    def _open(self) -> None:
        self.recording = ViewedRecording(self._run)
        self._rows = RecordedRows()
        self._decode = lru_cache(maxsize=1 << 17)(render.decoder(self._run))
        self._read: set[FramePosition] = set()
        if self.recording.began > 1:  # what was rolled back is left out, which takes all of the events
            for event in self.recording.events():
                self._rows.add(event)
            self._read.update(self.recording.places)

    def advance(self) -> float:
        """Scan on from the newest frame to the oldest, and return the share of the frames that were read: a group's
        batch is in its own frame or in a newer one. Raises RecordError on damage."""
        began = self.recording.began
        self.recording.refresh()
        if self.recording.began > max(1, began):
            self._open()
        until, places = time.monotonic() + SCAN_SECONDS, self.recording.places
        for place in reversed(places):
            if place not in self._read:
                for event in self.recording.at(place):
                    self._rows.add(event)
                self._read.add(place)
                if time.monotonic() > until:
                    break
        return len(self._read) / max(1, len(places))

    def overview(self) -> dict[str, Any]:
        """Return the batches, and what can be filtered by."""
        scanned = self.advance()
        rows = self._rows.groups.values()
        places = Counter("trained" if row.place.isdigit() else row.place for row in rows)
        steps = self.recording.steps
        return {"steps": steps, "tasks": sorted({row.task for row in rows}), "places": places, "scanned": scanned}

    def groups(self, wanted: GroupFilter, text: str = "", cursor: int | None = None, limit: int = 50) -> GroupPage:
        """Return a page of the groups that match, and whose prompt or answers contain the text."""
        scanned = self.advance()
        uids, found = self._candidates(wanted.step), list[GroupRow]()
        place = len(uids) if cursor is None else min(cursor, len(uids))
        until = time.monotonic() + SEARCH_SECONDS
        while place and len(found) < limit:
            row = self._rows.groups.get(uids[place - 1])
            if row is None and scanned < 1:
                break  # the scan has not come so far
            place -= 1
            if row and wanted.fits(row) and (not text or self._contains(row.uid, text.lower())):
                found.append(row)
            if time.monotonic() > until:
                break
        return GroupPage(found, place or None, scanned)

    def row(self, uid: str) -> GroupRow:
        """Return the row of a group, which may be far ahead of the scan. Raises RecordError if there is none."""
        while uid not in self._rows.groups and self.advance() < 1:
            pass
        if uid not in self._rows.groups:
            raise RecordError(f"{self.recording.folder} holds no group {uid!r:.80}")
        return self._rows.groups[uid]

    def content(self, uid: str, only: range, advantage: str) -> dict[str, Any]:
        """Return a group with the tokens of its trajectories in the range `only`."""
        return group_content(self.recording, self.row(uid), self._decode, only=only, advantage=advantage)

    def image(self, name: str) -> bytes:
        """Return an image as PNG. Raises RecordError if there is none."""
        return images_of(self.recording.folder, [name])[name]

    # -- internals -----------------------------------------------------------------------------------------

    def _candidates(self, step: int | None) -> list[str]:
        """Return the groups of a batch, which are read if the scan has not come to them; without a batch, all."""
        if step is None:
            return self.recording.uids
        if step in self.recording.steps and step not in self._rows.batches:
            batch = self.recording.batch(step)
            self._rows.add(Taken(step, [group.uid for group in batch.groups], batch.rollout))
            for group in batch.groups:
                self._rows.add(Committed(group.slot, packed(group), 0))
        return self._rows.batches[step].uids if step in self._rows.batches else []

    def _contains(self, uid: str, words: str) -> bool:
        group = self.recording.group(uid)
        return any(words in text.lower() for text in _texts(group.prompt_ids, group.trajectories, self._decode))


def _texts(prompt: list[int], trajectories: list[Any], decode: Callable[[int], str]) -> Iterator[str]:
    yield "".join(map(decode, prompt))
    for one in trajectories:
        yield "".join(decode(token) for turn in one.turns for token in [*turn.observation, *turn.completion.token_ids])
