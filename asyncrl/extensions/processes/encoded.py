"""Groups as the processes that play them send them: encoded, and decoded only where somebody looks inside."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from asyncrl.schema import Group


class EncodedGroup:
    """Stands in for a Group that another process has encoded: it goes into a batch or a snapshot as it came
    (schema.encode). What is not among its own attributes is that of the group, which is decoded at the first such
    access."""

    def __init__(
        self, uid: str, slot: int, task: str, lengths: list[int], rewards: list[float], data: bytes, compressed: Any
    ) -> None:
        """`data` is the encoded group, `compressed` what a recording keeps of it (records/events.py), if any."""
        self.uid = uid
        self.slot = slot
        self.task = task
        self.lengths = lengths
        self.rewards = rewards
        self.num_tokens = sum(lengths)
        self.data = data
        self.compressed = compressed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.group, name)

    @cached_property
    def group(self) -> Group:
        """The group itself."""
        return msgspec.msgpack.decode(self.data, type=Group)
