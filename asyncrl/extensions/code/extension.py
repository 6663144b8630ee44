"""What this folder adds: the reward `code`."""

from __future__ import annotations

from asyncrl import extension


class Code(extension.Extension):
    """Code is tested in a sandbox."""

    rewards = {"code": "asyncrl.extensions.code.code_reward:CodeReward"}  # noqa: RUF012


Own = Code
