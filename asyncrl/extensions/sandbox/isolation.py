"""Checks of how this machine is protected from code of the model, before a run that executes some starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from asyncrl.extensions.sandbox.local import FOR_ISOLATION, LocalSandboxes
from asyncrl.extensions.sandbox.protections import Protections
from asyncrl.launch.checks.findings import Finding, ok, refused, warning
from asyncrl.launch.prepare import Preparation


def used(prepared: Preparation) -> list[LocalSandboxes]:
    """Return the sandboxes in which a run's code would be executed, not yet started."""
    idle = not prepared.config.generates
    return [] if idle else [one for one in prepared.announced if isinstance(one, LocalSandboxes)]


def check_sandboxes(sandboxes: Sequence[LocalSandboxes]) -> list[Protections]:
    """Return how this machine is protected from code that the model writes, without duplicates. Raises ConfigError if
    the protection is weaker than required."""

    async def ask() -> list[Protections]:
        found = []
        for one in sandboxes:
            try:
                found.append(await one.describe())
            finally:
                await one.close()
        return found

    return list({str(one): one for one in asyncio.run(ask())}.values())


def findings(prepared: Preparation) -> Iterator[Finding]:
    """Check the protection of this machine."""
    sandboxes = used(prepared)
    if not sandboxes:
        return
    if not prepared.cluster.here:
        yield ok("sandbox", "checked on the job's machines when it starts")
        return
    found: list[Protections] = []
    yield from refused(lambda: found.extend(check_sandboxes(sandboxes)), "sandbox")
    for one in found:
        held = f"{one.kind}: {', '.join(one.holds)} protected"
        lacks = "; ".join(f"{name} not protected: {instead}" for name, instead in one.lacks.items())
        if one.isolated:
            yield ok("sandbox", f"{held}; {lacks}" if lacks else held)
        else:
            text = f"no isolation (allow_unsafe=true), little more than resource limits; {held}; {lacks}"
            yield warning("sandbox", text, f"{FOR_ISOLATION}.")


def warnings(prepared: Preparation) -> list[str]:
    """Return a warning for each backend without isolation. Raises ConfigError as check_sandboxes does."""
    return [
        f"WARNING: code of the model runs without isolation on this machine (allow_unsafe=true). {found}"
        for found in check_sandboxes(used(prepared))
        if not found.isolated
    ]
