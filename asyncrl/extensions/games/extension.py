"""What this folder adds: two kinds of tasks."""

from __future__ import annotations

from asyncrl import extension


class Games(extension.Extension):
    """Games and environments of two libraries."""

    tasks = {  # noqa: RUF012
        "gymnasium": "asyncrl.extensions.games.gymnasium_task:Gymnasium",
        "textarena": "asyncrl.extensions.games.textarena_task:TextArena",
    }


Own = Games
