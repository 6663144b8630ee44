"""What this folder adds: a transport of new weights."""

from __future__ import annotations

from asyncrl.extension import Extension, OfferedTransport


class Files(Extension):
    """weights.transport=disk."""

    transports = {  # noqa: RUF012
        "disk": OfferedTransport("asyncrl.extensions.files.transport:DiskTransport", by_file=True)
    }


Own = Files
