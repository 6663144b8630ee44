"""Agent that answers a question in one turn."""

from __future__ import annotations

from asyncrl.schema import Generate, Prompt, Trajectory, Turn


class SingleTurn:
    """Agent that calls the model once."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Generate one turn, whose context is the prompt."""
        return Trajectory([Turn([], await generate(prompt.token_ids, images=prompt.images))])
