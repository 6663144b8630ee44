"""A conversation in exact token ids: what a multi-turn agent is written with.

async def twice(prompt, generate):
    chat = Chat.of(prompt, generate)
    first = await chat.answer()
    chat.say("Are you sure?")
    return chat.trajectory(reward=float(first == await chat.answer()))
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.types import Completion, Generate, Message, Prompt, Trajectory, Turn


class Chat:
    """One conversation of one episode, or of one role in it."""

    def __init__(
        self,
        generate: Generate,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Message] = (),
        role: str = "",
        prompt_ids: list[int] | None = None,
    ) -> None:
        """From these messages, with what the template says of the tools; or from a prompt's ids."""
        self._generate, self._role, self._tools = generate, role, tools
        self._prompt = self._context = prompt_ids or []
        self._said: list[Message] = []
        self.turns: list[Turn] = []
        self._begins: list[int] | None = None
        self._fork: int | None = None
        if prompt_ids is None:
            self.restart(messages)

    @classmethod
    def of(cls, prompt: Prompt, generate: Generate, *, role: str = "") -> Chat:
        """That goes on from a prompt."""
        return cls(generate, role=role, prompt_ids=prompt.token_ids)

    @property
    def ended(self) -> bool:
        """The last answer was cut off, by its own limit or as the model's context is full: a further turn would answer
        half a sentence."""
        return bool(self.turns) and self.turns[-1].completion.finish_reason == "length"

    @property
    def length(self) -> int:
        """Tokens of the context, up to the last answer."""
        return len(self._context)

    def say(self, content: str | Sequence[Message], role: str = "user") -> None:
        """What the model reads next: one message, or several."""
        messages = [{"role": role, "content": content}] if isinstance(content, str) else content
        if self._begins is not None or not self.turns:
            raise ValueError("the model has not answered yet: what it reads first is given to Chat, or to restart")
        self._said += messages

    async def answer(self, *, max_new_tokens: int | None = None, state: str = "") -> str:
        """The model's next turn, as text. `state` names the environment's, for step-level groups."""
        return self._generate.template.decode((await self.complete(max_new_tokens, state)).token_ids)

    async def complete(self, max_new_tokens: int | None = None, state: str = "") -> Completion:
        """The model's next turn, in tokens."""
        observation, begins = self._read(), self._begins is not None
        context = [*self._context, *observation]
        completion = await self._generate(context, max_new_tokens=max_new_tokens, role=self._role)
        turn = Turn(observation, completion, begins=begins, role=self._role, state=state, fork=self._fork)
        self.turns.append(turn)
        self._context, self._begins, self._said, self._fork = [*context, *completion.token_ids], None, [], None
        return completion

    def _read(self) -> list[int]:
        """What the model has not read yet."""
        if self._begins is not None:
            return self._begins
        if not self.turns:
            return []
        if not self._said:
            raise ValueError("nothing was said since the model's last answer")
        last = self._context[-1] if self.turns[-1].completion.token_ids else None
        return self._generate.template.extend(self._said, last=last)

    def reward(self, reward: float, token_rewards: Sequence[float] = ()) -> None:
        """Of the last turn, beside that of the episode: added to what it has. `token_rewards`: one for each token."""
        last = self.turns[-1]
        self.turns[-1] = msgspec.structs.replace(
            last, reward=last.reward + reward, token_rewards=list(token_rewards) or last.token_rewards
        )

    def restart(self, messages: Sequence[Message]) -> None:
        """A context of its own from here on, such as a summary: what was written before stays in the trajectory, as a
        sample of its own."""
        self._context, self._said = [], []
        self._begins = self._generate.template.begin(messages, self._tools)

    def branch(self, turn: int) -> Chat:
        """Another way to go on, from where this turn was asked for, in the very same context: a chat that has yet to
        answer. In a trajectory the turns of this chat come first, and from its own beginning on, and then the branch's:
        Trajectory([*chat.turns, *branch.turns], reward)."""
        context = list(self._prompt)
        for one in self.turns[:turn]:
            context = [*([] if one.begins else context), *one.observation, *one.completion.token_ids]
        begins = self.turns[turn]
        branch = Chat(self._generate, tools=self._tools, role=self._role, prompt_ids=[])
        branch._begins = [*([] if begins.begins else context), *begins.observation]
        branch._fork = turn - 1
        return branch

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """What was said so far. Without a reward the task's own reward function scores it."""
        return Trajectory(list(self.turns), reward)
