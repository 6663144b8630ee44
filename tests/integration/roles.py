"""Agent with three roles for runs with several adapters: two that are trained, and one that a past version plays."""

from __future__ import annotations

from asyncrl.schema import Generate, Prompt

TRAINED = ("writer", "checker")
SETTINGS = (
    *(
        "agent=tests.integration.roles:three",
        "+agents.roles.checker.adapter=second",
        "+agents.roles.writer.adapter=policy",
    ),
    "+agents.roles.old.past={every: 2, keep: 2}",
)


async def three(prompt: Prompt, generate: Generate) -> None:
    """Ask each role for an answer. The task scores the last that is trained."""
    for role in ("writer", "old", "checker"):
        await generate(prompt.token_ids, role=role)
