"""One question, one answer."""

from __future__ import annotations

from asyncrl.types import Generate, Prompt, Trajectory, Turn


class SingleTurn:
    """Asks the model once."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """One turn, whose context is the prompt."""
        return Trajectory([Turn([], await generate(prompt.token_ids))])
