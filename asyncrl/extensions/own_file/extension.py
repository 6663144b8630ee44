"""What this folder adds: the flags --config and --schema of asyncrl-train."""

from __future__ import annotations

from asyncrl import extension


class OwnFile(extension.Extension):
    """Settings from a user's own file."""

    flags = {  # noqa: RUF012
        "--config": "asyncrl.extensions.own_file.own_file:with_own_file",
        "--schema": "asyncrl.extensions.own_file.own_file:print_schema",
    }


Own = OwnFile
