"""Sessions of saved runs."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.engine.client import GenerationClient
from asyncrl.engine.session import GenerationSession
from asyncrl.schema import Exchange


def resumed(
    client: GenerationClient, group: str, sample: str, born: int, received: int, said: Sequence[Exchange]
) -> GenerationSession:
    """Return the session of an episode that goes on."""
    session = client.generate(group=group, sample=sample, born=born)
    session.restore(received, said)
    return session
