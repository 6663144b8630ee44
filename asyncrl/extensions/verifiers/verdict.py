"""Which end of an episode has a reward, and what every other end is. An error is never a reward of 0.

verifiers itself scores several failures: a stage that runs out of time is "a stop, not a failure", a reward that is
missing counts as 0, and one that is not a number is kept. Here a reward is accepted only if the episode is ok, no stage
but the agent's own ran out of time, and every reward is present and finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import EpisodeFailed

REASONS = {
    "SandboxError": "sandbox",
    "TunnelError": "sandbox",
    "ToolsetError": "tool",
    "InterceptionError": "hub",
    "TimeoutError": "environment_timeout",
}
"""Reasons in the ledger by the class of error that verifiers tells; others are the environment's. All are retried."""
TRANSPORT = ("ConnectError", "ReadError", "WriteError", "RemoteProtocolError", "ConnectTimeout", "APIConnectionError")
"""Errors of connections between parts of verifiers, by which a harness that is innocent fails."""
OWN_TIMEOUT = "agent_timeout"


@dataclass(frozen=True)
class Verdict:
    """The rewards of an episode that was accepted."""

    of_roles: Mapping[str, float]
    """Reward of each trace that is trained, by its role."""
    parts: Mapping[str, float]
    """What the rewards were made of, by name; several traces are averaged."""
    metrics: Mapping[str, float]
    """What the environment measured besides."""


def judged(told: Mapping[str, Any]) -> Verdict:
    """Return the rewards of an episode that a worker tells of. Raises EpisodeFailed."""
    traces = told["traces"]
    for trace in traces:
        own = trace["stop"] == OWN_TIMEOUT and trace["trainable"]
        if trace["is_timeout"] and not own:
            raise EpisodeFailed("environment_timeout", f"{trace['agent']} ended with {trace['stop']}")
    if not told["ok"]:
        raise _failed(told)
    for trace in traces:
        for name, reward in {**trace["rewards"], "in all": trace["reward"]}.items():
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise EpisodeFailed("environment_garbage", f"reward {name} of {trace['agent']} is {reward}")
    trained = [trace for trace in traces if trace["trainable"]]
    if unrewarded := [trace["agent"] for trace in trained if not trace["rewards"]]:
        raise EpisodeFailed("environment_garbage", f"{unrewarded[0]} has no reward")
    if not trained:
        raise EpisodeFailed("environment_garbage", "no trace of the episode is trained")
    of_roles = {trace["role"]: float(trace["reward"]) for trace in trained}
    return Verdict(of_roles, _means(trained, "rewards"), _means(trained, "metrics"))


def _failed(told: Mapping[str, Any]) -> EpisodeFailed:
    """Return what an episode that is not ok failed of: the last error of a trace, or else its own."""
    failed = [trace for trace in told["traces"] if not trace["ok"]]
    errors = [error for part in (told, *failed) for error in part["errors"]]
    if not errors:
        return EpisodeFailed("environment_error", "the episode is not ok, and tells no error")
    kind, message, status = errors[-1]["type"], errors[-1]["message"], errors[-1]["status"]
    detail = f"{kind}: {message}"
    if kind == "ProviderError":  # an engine that failed ends the session before: what is left are refusals
        refused = status is not None and 400 <= status < 500
        return EpisodeFailed("agent_error" if refused else "hub", detail, retry=not refused)
    if kind == "HarnessError":
        broken = any(name in message for name in TRANSPORT)
        return EpisodeFailed("hub" if broken else "agent_error", detail, retry=broken)
    return EpisodeFailed(REASONS.get(kind, "environment_error"), detail)


def _means(traces: list[Any], field: str) -> dict[str, float]:
    """Return the mean of each number over the traces that have it."""
    found: dict[str, list[float]] = {}
    for name, value in (item for trace in traces for item in trace[field].items()):
        if isinstance(value, int | float) and math.isfinite(value):
            found.setdefault(name, []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
