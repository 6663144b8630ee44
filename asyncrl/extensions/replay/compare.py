"""replay.compare: compare what is generated with what a recorded run generated for the same slots.

The same settings and seed give the same prompts to the same slots; answers agree as far as engines are deterministic
(docs/runs.md). A group with another prompt, or one that the recording lacks, is only counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl import jsonl
from asyncrl.errors import RecordError
from asyncrl.extension import RolloutHooks
from asyncrl.extensions.recording.reader import Recording
from asyncrl.schema import Completion, Group

if TYPE_CHECKING:
    from asyncrl.rollout.reporters import RolloutRun

FILE = "compare.jsonl"


class GroupComparison(RolloutHooks):
    """Compares every finished group, and appends a line per trajectory to the file."""

    _recording: Recording | None = None  # none in a run without replay.compare

    def __init__(self, compared: str | None) -> None:
        """`compared` is the folder of the recorded run; None to compare nothing."""
        self._folder = compared

    def start(self, run: RolloutRun) -> None:
        """Open the recording."""
        if self._folder:
            self._recording, self._file = Recording(Path(self._folder).expanduser()), run.run_dir / FILE
        self._same = self._compared = self._others = 0
        self._gap = 0.0

    def figures(self) -> dict[str, float]:
        """Return the figures of all trajectories so far."""
        if self._recording is None:
            return {}
        return {
            "compare/same": self._same / max(1, self._compared),
            "compare/gap": self._gap,
            "compare/others": float(self._others),
        }

    def group(self, group: Group) -> None:
        """Compare a group."""
        if self._recording is None:
            return
        try:
            recorded = self._recording.group(group.uid)
        except RecordError:
            recorded = None
        if recorded is None or recorded.prompt_ids != group.prompt_ids:
            self._others += 1
            return
        for number, (now, then) in enumerate(zip(group.trajectories, recorded.trajectories, strict=False)):
            turns = zip(now.turns, then.turns, strict=False)
            places = [(turn, *difference(a.completion, b.completion)) for turn, (a, b) in enumerate(turns)]
            found = next(((turn, at) for turn, at, _ in places if at is not None), None)
            if found is None and len(now.turns) != len(then.turns):
                found = (len(places), 0)
            gap = max((gap for _, _, gap in places), default=0.0)
            self._compared += 1
            self._same += found is None
            self._gap = max(self._gap, gap)
            line = {"uid": group.uid, "trajectory": number, "same": found is None, "logprob_gap": gap}
            jsonl.append(self._file, line | ({"turn": found[0], "token": found[1]} if found else {}))


def difference(now: Completion, then: Completion) -> tuple[int | None, float]:
    """Return the position at which two answers first differ, or None, and the largest log-probability gap before it."""
    alike = 0
    for one, other in zip(now.token_ids, then.token_ids, strict=False):
        if one != other:
            break
        alike += 1
    gaps = [abs(a - b) for a, b in zip(now.logprobs[:alike], then.logprobs[:alike], strict=True)]
    same = alike == len(now.token_ids) == len(then.token_ids)
    return None if same else alike, max(gaps, default=0.0)
