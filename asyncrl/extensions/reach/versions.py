"""Check of the installed packages against the versions that the project is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncrl.launch.checks.findings import Finding, error, ok, warning
from asyncrl.launch.checks.versions import MUST_MATCH
from asyncrl.launch.machine import MachineFacts

INSTALL = "Install the pinned versions: asyncrl-install, or on a machine with GPUs pip install 'asyncrl[gpu]'."


def check_versions(machines: Sequence[MachineFacts], pins: Mapping[str, str]) -> list[Finding]:
    """Check the first machine against the pins, and all others against the first."""
    first, *others = machines
    found = _against_pins(first.versions, pins)
    for other in others:
        differing = sorted(
            name
            for name in first.versions.keys() | other.versions.keys()
            if first.versions.get(name) != other.versions.get(name)
        )
        if differing:
            what = ", ".join(
                f"{name} {first.versions.get(name, 'missing')} and {other.versions.get(name, 'missing')}"
                for name in differing
            )
            remedy = "Install the same environment on all machines, or one on their shared file system."
            found.append(error("versions", f"{first.name} and {other.name} differ: {what}", remedy))
    if not found:
        names = ", ".join(f"{name} {first.versions[name]}" for name in ("python", "asyncrl", *pins))
        found.append(ok("versions", names + (f", the same on {len(machines)} machines" if others else "")))
    return found


def _against_pins(versions: Mapping[str, str], pins: Mapping[str, str]) -> list[Finding]:
    found = []
    for name, pin in pins.items():
        mine = versions.get(name)
        if mine is None:
            found.append(error("versions", f"{name} is not installed, but asyncrl requires {pin}", INSTALL))
        elif mine.partition("+")[0] != pin:  # 2.13.0+cpu is a build of 2.13.0
            tell = error if name in MUST_MATCH else warning
            found.append(tell("versions", f"{name} {mine} is installed, but asyncrl requires {pin}", INSTALL))
    return found
