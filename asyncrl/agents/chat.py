"""A conversation in exact token ids, the building block of multi-turn agents.

Example:

    async def twice(prompt, generate):
        chat = Chat.of(prompt, generate)
        first = await chat.answer()
        chat.say("Are you sure?")
        return chat.trajectory(reward=float(first == await chat.answer()))
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from asyncrl.images import image_name, images_in
from asyncrl.schema import Completion, Generate, Message, Prompt, Trajectory, Turn


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
        images: Sequence[bytes] = (),
    ) -> None:
        """Start a conversation from messages, rendered with the tools, or from a prompt's token ids and images."""
        self._generate, self._role, self._tools = generate, role, tools
        self._prompt = self._context = prompt_ids or []
        self._prompt_images = self._images = list(images)
        self._said: list[Message] = []
        self.turns: list[Turn] = []
        self._begins: list[int] | None = None
        self._fork: int | None = None
        if prompt_ids is None:
            self.restart(messages)

    @classmethod
    def of(cls, prompt: Prompt, generate: Generate, *, role: str = "") -> Chat:
        """Return a conversation that continues a prompt."""
        return cls(generate, role=role, prompt_ids=prompt.token_ids, images=prompt.images)

    @property
    def ended(self) -> bool:
        """True if the last answer was truncated, by its own limit or because the model's context is full.

        Another turn would respond to an unfinished sentence.
        """
        return bool(self.turns) and self.turns[-1].completion.finish_reason == "length"

    @property
    def length(self) -> int:
        """Number of tokens in the context, including the last answer."""
        return len(self._context)

    def say(self, content: str | Sequence[Message], role: str = "user") -> None:
        """Add the message that the model reads next, as a text, or several messages."""
        messages = [{"role": role, "content": content}] if isinstance(content, str) else content
        if self._begins is not None or not self.turns:
            raise ValueError("the model has not answered yet: pass its first messages to Chat, or to restart")
        self._said += messages

    async def answer(self, *, max_new_tokens: int | None = None, state: str = "") -> str:
        """Generate the model's next turn and return its text.

        `state` names the state of the environment, for step-level groups.
        """
        return self._generate.template.decode((await self.complete(max_new_tokens, state)).token_ids)

    async def complete(self, max_new_tokens: int | None = None, state: str = "") -> Completion:
        """Generate the model's next turn and return its completion."""
        observation, begins = self._read(), self._begins is not None
        new = await self._generate.images(self._said) if images_in(self._said) else []
        context, images = [*self._context, *observation], [*self._images, *new]
        completion = await self._generate(context, max_new_tokens=max_new_tokens, role=self._role, images=images)
        names = [image_name(png) for png in (images if begins else new)]
        turn = Turn(observation, completion, begins=begins, role=self._role, state=state, fork=self._fork, images=names)
        self.turns.append(turn)
        self._context = [*context, *completion.token_ids]
        self._begins = None
        self._said = []
        self._fork = None
        self._images = images
        return completion

    def _read(self) -> list[int]:
        """Return the tokens that the model has not read yet."""
        if self._begins is not None:
            return self._begins
        if not self.turns:
            return []
        if not self._said:
            raise ValueError("no message was added since the model's last answer")
        last = self._context[-1] if self.turns[-1].completion.token_ids else None
        return self._generate.template.extend(self._said, last=last)

    def reward(self, reward: float, token_rewards: Sequence[float] = ()) -> None:
        """Add a reward to the last turn, besides the episode's reward. `token_rewards` has one value per token."""
        last = self.turns[-1]
        self.turns[-1] = msgspec.structs.replace(
            last, reward=last.reward + reward, token_rewards=list(token_rewards) or last.token_rewards
        )

    def restart(self, messages: Sequence[Message]) -> None:
        """Start a new context, for example from a summary.

        The turns so far stay in the trajectory, as a separate sample.
        """
        self._context, self._images, self._said = [], [], list(messages)
        self._begins = self._generate.template.begin(messages, self._tools)

    def branch(self, turn: int) -> Chat:
        """Return a new chat that branches off before this turn, with exactly the same context and no answer yet.

        A trajectory must hold all turns of this chat first and then those of the branch:
        Trajectory([*chat.turns, *branch.turns], reward).
        """
        context, seen = list(self._prompt), len(self._prompt_images)
        for one in self.turns[:turn]:
            context = [*([] if one.begins else context), *one.observation, *one.completion.token_ids]
            seen = (0 if one.begins else seen) + len(one.images)
        begins = self.turns[turn]
        images = self._images[: (0 if begins.begins else seen) + len(begins.images)]
        branch = Chat(self._generate, tools=self._tools, role=self._role, prompt_ids=[], images=images)
        branch._begins = [*([] if begins.begins else context), *begins.observation]
        branch._fork = turn - 1
        return branch

    def trajectory(self, reward: float | None = None) -> Trajectory:
        """Return the turns so far as a trajectory. Without a reward, the task's own reward function scores it."""
        return Trajectory(list(self.turns), reward)
