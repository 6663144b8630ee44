"""replay.compare: compare what is generated with what a recorded run generated for the same slots.

The same settings and seed give the same prompts to the same slots; answers agree as far as engines are deterministic
(docs/runs.md). A group with another prompt, or one that the recording lacks, is only counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncrl.errors import RecordError
from asyncrl.records.reading import Recording
from asyncrl.records.writer import Writer
from asyncrl.rollout.cohorts import Ticket
from asyncrl.rollout.recorder import Recorder
from asyncrl.schema import Completion, Group


class ComparingRecorder(Recorder):
    """Recorder that also compares every finished group, and reports a line per trajectory."""

    def __init__(
        self,
        recording: Recording,
        tell: Callable[[dict[str, Any]], None],
        writer: Writer | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        super().__init__(writer, warn)
        self._recording, self._tell = recording, tell
        self._same = self._compared = self._others = 0
        self._gap = 0.0

    def committed(self, ticket: Ticket, group: Group, discarded: int) -> None:
        self._compare(group)
        super().committed(ticket, group, discarded)

    def rejected(self, ticket: Ticket, reason: str, tokens: int, group: Group | None) -> None:
        if group:
            self._compare(group)
        super().rejected(ticket, reason, tokens, group)

    def take_figures(self) -> dict[str, float]:
        return {
            **super().take_figures(),
            "compare/same": self._same / max(1, self._compared),
            "compare/gap": self._gap,
            "compare/others": float(self._others),
        }

    def _compare(self, group: Group) -> None:
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
            self._tell(line | ({"turn": found[0], "token": found[1]} if found else {}))


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
