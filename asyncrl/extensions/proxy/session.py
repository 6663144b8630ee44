"""Session of one episode behind the proxy, which turns its program's requests into a trajectory.

    async with ProxySession(generate, ...) as session:
        ...                                        the program plays, over HTTP or by calling `chat` and `complete`
        trajectory = session.trajectory(prompt_ids, reward)

waits for     engines (`generate`, with its own deadlines) and the program (the episode's deadlines)
on an error   an error of the fleet cancels the block, which raises it however the program handled the 503 response, so
              that the failure is attributed to the engine and not to the agent
at its end    open requests are cancelled; tokens that engines generated for them count as discarded
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from jinja2 import TemplateError

from asyncrl.agents.linking import link
from asyncrl.errors import AsyncRLError, EpisodeFailed, PromptRefused
from asyncrl.extensions.proxy import messages, parsing
from asyncrl.extensions.proxy.answers import ApiResponse, ResponseChoice
from asyncrl.extensions.proxy.fields import Body, RequestOptions, Route, read
from asyncrl.extensions.proxy.histories import ChatHistories, TextHistories
from asyncrl.extensions.proxy.messages import ApiError, bad_field
from asyncrl.extensions.proxy.rewards import Rewards
from asyncrl.images import ImageRefused, image_name, images_in
from asyncrl.schema import Completion, Exchange, Generate, Message, Template, Trajectory


@dataclass
class ProxyStats:
    """Counts since the proxy's start."""

    turns: int = 0  # answers sent to clients
    contexts_begun: int = 0  # of these, answers that continue no earlier answer of their session
    refused: int = 0  # requests refused because of their content
    abandoned: int = 0  # requests whose client disconnected or whose episode ended first
    malformed: int = 0  # tool calls that could not be read, and stayed in the text


class ProxySession:
    """Session of one episode."""

    def __init__(
        self, generate: Generate, *, tool_format: str, figures: ProxyStats, secret: str = "", reasoning: bool = False
    ) -> None:
        """Create a session. Its API key is `secret` and its name."""
        self.name = secrets.token_hex(16)
        self.key = f"{secret}-{self.name}"
        self.closed = False
        self._generate, self._tool_format, self._figures = generate, tool_format, figures
        self._reasoning = reasoning
        self._chats, self._texts = ChatHistories(), TextHistories()
        self._serial = itertools.count()
        self._answered: list[tuple[int, Exchange]] = []  # with the numbers of their requests
        self._images: dict[str, bytes] = {}  # of the answered requests, by name
        self._rewards = Rewards()
        self._full = False
        self._calls: dict[asyncio.Task[Any], str] = {}  # open requests with their roles
        self._fault: AsyncRLError | None = None
        self._scope = asyncio.timeout(None)

    async def __aenter__(self) -> ProxySession:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError:  # `fail` set the deadline
            assert self._fault is not None
            raise self._fault from None
        if self._fault is not None and not isinstance(error, asyncio.CancelledError):
            raise self._fault from error

    def close(self) -> None:
        """Cancel the open requests, and answer no further ones."""
        self.closed = True
        for call in self._calls:
            call.cancel()

    @contextmanager
    def call(self, role: str = "") -> Iterator[asyncio.Task[Any]]:
        """Track the current task as one request, and yield it, so that it can be cancelled when its client disconnects.
        `role` names the actor that makes it, in an episode with several.

        Raises ApiError (410) when the episode ends first.
        """
        task = asyncio.current_task()
        assert task is not None
        self._calls[task] = role
        try:
            yield task
        except asyncio.CancelledError:
            self._figures.abandoned += 1
            if not self.closed:
                raise
            raise gone() from None
        finally:
            del self._calls[task]

    def fail(self, error: AsyncRLError) -> None:
        """End the episode with this error, which its block raises."""
        if self._fault is None and not self.closed:
            self._fault = error
            self._scope.reschedule(asyncio.get_running_loop().time())

    @property
    def template(self) -> Template:
        """Chat template of the model."""
        return self._generate.template

    # -- requests ------------------------------------------------------------------------------------------

    async def chat(self, body: Body) -> ApiResponse:
        """Answer POST /v1/chat/completions. Raises ApiError."""
        wanted = self._wanted(body, "chat")
        sent = messages.read_all(body.get("messages"))
        tools, choice = body.get("tools") or [], body.get("tool_choice") or "auto"
        tools_key, known, new = self._lookup(sent, tools)
        images = [*self._seen(known), *await self._read(new)]
        begins = parsing.forced(choice, tools, self._tool_format)
        context = [*self._render(new, tools, known), *(self.template.encode(begins) if begins else ())]
        asked = await self._ask(context, wanted, images, begins=known is None)
        choices = []
        for turn, one in asked:
            written = self.template.decode(one.completion.token_ids)
            text, stop = wanted.cut(written)
            thought, rest = messages.without_thoughts(begins + text) if self._reasoning else ("", begins + text)
            read = parsing.Parsed(rest)
            if tools and choice != "none":
                before = sum(message.calls for message in sent)
                read = parsing.parse(rest, self._tool_format, tools, before=before)
            said = messages.assistant(read.text, read.calls) | ({"reasoning_content": thought} if thought else {})
            if written == text + (stop or ""):  # else more was written than the client has read
                self._chats.keep(tools_key, [*(message.key for message in sent), messages.read(said).key], one)
            self._figures.malformed += len(read.malformed)
            choices.append(ResponseChoice(turn, one.completion, said, stop, read.malformed))
        return ApiResponse(wanted, context, choices)

    def count(self, body: Body) -> int:
        """Return the number of tokens that a chat has the model read. Raises ApiError."""
        tools = body.get("tools") or []
        _, known, new = self._lookup(messages.read_all(body.get("messages")), tools)
        return len(self._render(new, tools, known))

    async def complete(self, body: Body) -> ApiResponse:
        """Answer POST /v1/completions. Raises ApiError."""
        wanted, prompt = self._wanted(body, "text"), body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt  # a batch of one
        if isinstance(prompt, str) and prompt:
            known, rest = self._texts.find(prompt)
            written = _ids(known) if known else []
            context = [*written, *self.template.encode(rest, begins=known is None)]
        elif isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
            context = prompt
            known = next((one for _, one in self._answered if context[: _size(one)] == _ids(one)), None)
        else:
            raise bad_field("prompt", prompt, "Must be one text, or the token ids of one.")
        choices = []
        for turn, one in await self._ask(context, wanted, self._seen(known), begins=known is None):
            text, stop = wanted.cut(said := self.template.decode(one.completion.token_ids))
            if isinstance(prompt, str):
                self._texts.keep(prompt + said, one)
            choices.append(ResponseChoice(turn, one.completion, {"role": "assistant", "content": text}, stop))
        return ApiResponse(wanted, context, choices)

    def take_reward(self, body: Body) -> None:
        """Handle POST /v1/reward. Raises ApiError."""
        self._rewards.take(body, [asked for _, asked in self._answered])

    @property
    def posted(self) -> float | None:
        """Posted reward of the episode, or None."""
        return self._rewards.episode

    def trajectory(
        self,
        prompt_ids: list[int],
        reward: float | None,
        images: Sequence[bytes] = (),
        roles: Container[str] | None = None,
    ) -> Trajectory:
        """Return all answers as a trajectory, or those of some roles, with the rewards of turns. Raises EpisodeFailed
        when there are none."""
        in_order = sorted(self._answered, key=lambda answer: answer[0])
        in_order = [one for one in in_order if roles is None or one[1].role in roles]
        if not in_order:
            raise EpisodeFailed("agent_error", "it made no request to the model")
        turns = link(prompt_ids, [asked for _, asked in in_order], [image_name(png) for png in images])
        return Trajectory(self._rewards.given(turns, [asked for _, asked in self._answered]), reward)

    @property
    def _role(self) -> str:
        """Role of the actor whose request the current task is."""
        task = asyncio.current_task()
        return self._calls.get(task, "") if task else ""

    # -- tokens --------------------------------------------------------------------------------------------

    def _lookup(
        self, sent: Sequence[messages.CanonicalMessage], tools: Sequence[Any]
    ) -> tuple[bytes, Exchange | None, list[Message]]:
        """Return the key of the role and tools, the chat that these messages continue, and those that it has not."""
        tools_key = self._role.encode() + messages.tools_key(tools)
        known, length = self._chats.find(tools_key, [message.key for message in sent])
        return tools_key, known, [message.rendered for message in sent[length:]]

    def _wanted(self, body: Body, route: Route) -> RequestOptions:
        return read(body, route, temperature=self._generate.temperature, end=self.template.end)

    def _render(self, chat: Sequence[Message], tools: Sequence[Any], known: Exchange | None) -> list[int]:
        """Return the tokens of a new chat, or those of a known chat followed by those of the messages since."""
        try:
            if known is None:
                return self.template.begin(chat, tools)
            written = known.completion.token_ids
            return [*_ids(known), *self.template.extend(chat, last=written[-1] if written else None)]
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ApiError(400, f"the chat template rejects these messages: {error}", param="messages") from error

    async def _read(self, chat: Sequence[Message]) -> list[bytes]:
        """Return the images of messages. Raises ApiError (400)."""
        try:
            return await self._generate.images(chat) if images_in(chat) else []
        except ImageRefused as refused:
            raise ApiError(400, f"an image is refused: {refused}", param="messages") from None

    def _seen(self, known: Exchange | None) -> list[bytes]:
        """Return the images of an earlier request."""
        return [self._images[name] for name in known.images] if known else []

    async def _ask(
        self, context: list[int], wanted: RequestOptions, images: Sequence[bytes], *, begins: bool
    ) -> list[tuple[int, Exchange]]:
        """Generate the answers and return each with the number of its turn. Raises ApiError (503) when engines fail."""
        numbers = [next(self._serial) for _ in range(wanted.choices)]
        role = self._role
        limits: dict[str, Any] = {"max_new_tokens": wanted.limit, "stop": wanted.stop}
        calls = [self._generate(context, role=role, images=images, **limits) for _ in numbers]
        answered, names = [], [image_name(png) for png in images]
        self._images |= zip(names, images, strict=True)
        for number, completion in zip(numbers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(completion, AsyncRLError):
                self.fail(completion)
                raise ApiError(503, f"the engines cannot answer, and the episode is over: {completion}")
            if isinstance(completion, ImageRefused | PromptRefused):
                field = "messages" if isinstance(completion, ImageRefused) else "prompt"
                raise ApiError(400, f"the request is refused: {completion}", param=field)
            if isinstance(completion, BaseException):
                raise completion
            answered.append((number, Exchange(context, completion, role, names)))
        self._look_at_room([asked.completion for _, asked in answered], len(context))
        first = len(self._answered)
        self._answered += answered
        self._figures.turns += len(answered)
        self._figures.contexts_begun += len(answered) if begins else len(answered) - 1
        return [(first + n, asked) for n, (_, asked) in enumerate(answered)]

    def _look_at_room(self, completions: Sequence[Completion], length: int) -> None:
        """Refuse a second request in a row that has no room in the model's context.

        The first such request gets an empty answer with finish reason "length", so that a program can end normally. A
        program that goes on gets an error, because it might go on forever.
        """
        full = not any(completion.token_ids for completion in completions)
        if full and self._full:
            message = f"the model's context has no room for an answer to {length} tokens"
            raise ApiError(400, message, param="messages", code="context_length_exceeded")
        self._full = full


def gone() -> ApiError:
    """Return the error for requests of an episode that has ended."""
    return ApiError(410, "the episode of this API key has ended")


def _ids(asked: Exchange) -> list[int]:
    return [*asked.context, *asked.completion.token_ids]


def _size(asked: Exchange) -> int:
    return len(asked.context) + len(asked.completion.token_ids)
