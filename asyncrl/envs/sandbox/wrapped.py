"""The beginning of a supervisor that bubblewrap starts: all else of its sandbox is made already."""

from __future__ import annotations

import json
import os
import sys

from asyncrl.envs.sandbox import view
from asyncrl.envs.sandbox.supervisor import Place, SandboxSupervisor, keep_only


def main() -> None:
    """Serve the sandbox that the first argument describes."""
    place = Place(**json.loads(sys.argv[1]))
    keep_only(place.descriptors)
    uid = place.confinement["uid"]
    for name in view.WRITABLE_FOLDERS:
        if uid is not None:
            os.chmod(f"{view.WRITABLE}/{name}", view.SHARED)
            os.chown(f"{view.WRITABLE}/{name}", uid, uid)
    SandboxSupervisor(place).serve()
