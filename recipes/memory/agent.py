"""Agent for episodes longer than a context: the model writes notes, then continues from the question and its notes.

    question         | a o b o           notes?  n       sample 1
    question + n     | c o d o           notes?  m       sample 2
    question + m     | e                                 sample 3

Each context is a sample. The notes are turns like all others, and every turn is trained with the outcome of the episode
(SUPO, arXiv 2510.06727; MemAgent, arXiv 2507.02259). Actions and notes of one episode have the same role, so that all
of its samples together are compared with those of its siblings.
"""

from __future__ import annotations

from asyncrl.agents.playing import Player, acted, chat_of, finished, initial_state, messages_of, opened, with_text
from asyncrl.envs.env import Step
from asyncrl.envs.pool import EnvironmentPool
from asyncrl.schema import Generate, Prompt, Trajectory

ASK = (
    "Before you go on, write notes: what was done, what was found, and what is next. "
    "All but the question and these notes will be gone."
)
NOTES = "Your notes on what happened so far:\n{notes}"


class Memory(Player):
    """Agent that has the model write notes and then restarts the context from the question and these notes.

    context_tokens   request notes once a context exceeds this many tokens (0: after every turn); it must leave room for
                     one more observation and for the notes
    note_tokens      maximum length of the notes, which do not count towards `max_turns`
    ask, notes       the request for notes, and the template of the text after the question that contains them
    """

    def __init__(
        self,
        environments: EnvironmentPool,
        *,
        max_turns: int = 32,
        context_tokens: int = 0,
        note_tokens: int | None = None,
        ask: str = ASK,
        notes: str = NOTES,
    ) -> None:
        super().__init__(environments, max_turns=max_turns)
        self._context_tokens, self._note_tokens = context_tokens, note_tokens
        self._ask, self._notes = ask, notes

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Play one episode."""
        async with self._environments() as env:
            question = await opened(env, prompt.question)
            chat, state, step = chat_of(prompt, question, generate), initial_state(prompt.question), Step()
            for turn in range(self._max_turns):
                step = (await acted(env, chat, state)).step
                if step.done or chat.ended or turn == self._max_turns - 1:
                    break
                said, state = messages_of(step.messages), step.state
                if chat.length <= self._context_tokens:
                    chat.say(said)
                    continue
                chat.say(with_text(said, self._ask) if said else self._ask)
                notes = await chat.answer(max_new_tokens=self._note_tokens)
                if not chat.turns[-1].completion.token_ids:
                    break  # the context had no room for notes
                chat.restart(with_text(question, self._notes.format(notes=notes)))
            await finished(env, chat, step)
        return chat.trajectory(reward=None if step.score else 0.0)
