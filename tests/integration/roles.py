"""Agents for runs with several adapters: three roles, of which a past version plays one, and two that read images."""

from __future__ import annotations

from asyncrl.agents.chat import Chat
from asyncrl.extensions.squares.drawing import squares
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


async def two_that_see(prompt: Prompt, generate: Generate) -> None:
    """Show each trained role the prompt's image, and another one after its answer. The task scores the last answer."""
    for role in TRAINED:
        chat = Chat.of(prompt, generate, role=role)
        await chat.answer()
        chat.say([{"role": "user", "content": [{"type": "image", "image": squares({5: (220, 30, 30)}, 4)}]}])
        await chat.answer()
