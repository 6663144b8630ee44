"""Kinds of sandboxes that tests create. Other Pythons import this module, so it uses the standard library only."""

from __future__ import annotations

from typing import Literal

from asyncrl.extensions.sandbox import local, start

Kind = Literal["own users", "one user", "unsafe"]
"""Bubblewrap as root has it; as everybody else has it, and a root that may not mount; and none."""


def only(kind: Kind) -> None:
    """Let backends of this process make sandboxes of this kind alone."""

    def ways(allow_unsafe: bool) -> tuple[list[start.Way], str]:
        found, why = start.ways(True)
        if kind == "unsafe":
            return [way for way in found if way.kind == "unsafe"], why
        own = kind == "own users"
        return [way for way in found if way.kind == "bubblewrap" and (way.own_uid == "programs") == own], why

    setattr(local, "ways", ways)  # noqa: B010
