"""What this folder adds: advantage estimators and losses of single papers."""

from __future__ import annotations

from asyncrl import extension

HERE = __package__
ESTIMATORS = ("opo", "maxrl", "pass_at_k", "grpo_passk")
LOSSES = ("gspo_token", "sapo", "minirl", "dppo_tv", "topr", "vespo", "m2po")


class Papers(extension.Extension):
    """Algorithms that few runs choose."""

    advantages = {name: f"{HERE}.advantage:{name}" for name in ESTIMATORS}  # noqa: RUF012
    losses = {name: f"{HERE}.loss:{name}" for name in LOSSES}  # noqa: RUF012


Own = Papers
