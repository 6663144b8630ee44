"""What this folder adds: processes that hold environments."""

from __future__ import annotations

from asyncrl import extension


class Hosting(extension.Extension):
    """Environments that may hang, crash or block."""

    hosting = "asyncrl.extensions.hosting.hosted:HostProcesses"


Own = Hosting
