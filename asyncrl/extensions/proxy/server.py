"""HTTP server of the proxy, in the event loop of the rollout process.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models    GET /v1/models/{name}
    POST /v1/responses           POST /v1/messages       POST /v1/messages/count_tokens
    POST /v1/reward {"reward": x}                  reward of the episode
    POST /v1/reward {"reward": x, "turn": k}       reward of the answer whose choice has this `turn`

The API key identifies the episode: `Authorization: Bearer SECRET-SESSION`. All keys of a proxy have the same SECRET, so
that the key of an episode that has ended (410) can be told from one that was never issued (401). A client that serves
several episodes has the SECRET alone, and names the episode in a header: `X-Session-ID: SESSION`, or SESSION.ROLE for
one of several actors in an episode.

waits for     request bodies and engines, until the client disconnects or the episode ends, which cancels the request.
              The proxy needs no deadlines, because episodes have them (rollout/episode.py)
on death      the next episode raises AsyncRLError when the server has ended
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.extensions.proxy import messages_api, parsing, responses_api
from asyncrl.extensions.proxy.answers import ApiResponse
from asyncrl.extensions.proxy.fields import Body
from asyncrl.extensions.proxy.fields import Route as Kind
from asyncrl.extensions.proxy.messages import ApiError
from asyncrl.extensions.proxy.session import ProxySession, ProxyStats, gone
from asyncrl.extensions.tools import calls as tool_calls
from asyncrl.network.serving import SignalFreeServer
from asyncrl.schema import Generate

MOST_BYTES = 32 << 20
"""Maximum size of a request body; a context of a million tokens has about 5 MB."""
BACKLOG = 4096
KEEP_ALIVE = 75  # seconds; clients close idle connections earlier, so none is closed while it sends
CLOSE_SECONDS = 2
MODEL = {"id": "policy", "object": "model", "created": 0, "owned_by": "asyncrl"}
"""The only model. Requests may use any name for it."""

Handle = Callable[[ProxySession, Body], Awaitable[Response]]


class Proxy:
    """The proxy's server and its sessions."""

    def __init__(
        self, *, host: str = "127.0.0.1", port: int = 0, tool_format: str = "hermes", reasoning: bool = False
    ) -> None:
        """Create the proxy. Raises ConfigError for an unknown `tool_format`.

        port: 0 for any free port
        tool_format: format in which the model writes tool calls (parsing.py)
        reasoning: tell thoughts (<think>) apart from the content of answers
        """
        self._reasoning = reasoning
        self._host, self._port = host, port
        self._tool_format = parsing.known(tool_format, "agent_params.tool_format")
        self.secret = secrets.token_urlsafe(12)
        """Key of clients that serve several episodes."""
        self._sessions: dict[str, ProxySession] = {}
        self._server: SignalFreeServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.figures = ProxyStats()

    def start(self) -> None:
        """Start the server unless it is running. Raises OSError when the address is taken."""
        if self._serving is not None:
            return
        parsing.load(self._tool_format)
        listening = _listen(self._host, self._port)
        self._port = listening.getsockname()[1]
        settings: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False, "lifespan": "off"}
        self._server = SignalFreeServer(
            uvicorn.Config(
                self._app(),
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=CLOSE_SECONDS,
                **settings,
            )
        )
        self._serving = asyncio.create_task(self._server.serve([listening]))

    async def close(self) -> None:
        """Close all sessions and stop the server."""
        for session in self._sessions.values():
            session.close()
        if self._serving and self._server:
            self._server.end()
            await asyncio.wait({self._serving})

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    @asynccontextmanager
    async def session(self, generate: Generate) -> AsyncIterator[ProxySession]:
        """Open the session of one episode.

        If `generate` failed in the block, raise its error, whatever the block itself raises.
        """
        self.start()
        if self._serving and self._serving.done():
            raise AsyncRLError("the proxy's server has ended") from self._serving.exception()
        made = ProxySession(
            generate,
            tool_format=self._tool_format,
            figures=self.figures,
            secret=self.secret,
            reasoning=self._reasoning,
        )
        self._sessions[made.key] = made
        try:
            async with made:
                yield made
        finally:
            del self._sessions[made.key]

    # -- HTTP ----------------------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        routes = [
            Route("/v1/chat/completions", self._route(_chat), methods=["POST"]),
            Route("/v1/completions", self._route(_complete), methods=["POST"]),
            Route("/v1/responses", self._route(_responses), methods=["POST"]),
            Route("/v1/messages", self._route(_messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", self._route(_count_tokens), methods=["POST"]),
            Route("/v1/reward", self._route(_reward), methods=["POST"]),
            Route("/v1/models", self._route(_models), methods=["GET"]),
            Route("/v1/models/{name:path}", self._route(_model), methods=["GET"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: self._bug})

    def _route(self, handle: Handle) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                return await _while_wanted(*self._of(request), request, handle)
            except ApiError as refused:
                self.figures.refused += refused.status in (400, 413)
                return _refusal(refused)
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it: the client has disconnected

        return endpoint

    def _of(self, request: Request) -> tuple[ProxySession, str]:
        """Return the session of a request, and the role. Raises ApiError (401 or 410)."""
        anthropic = f"bearer {request.headers.get('x-api-key', '')}"
        scheme, _, key = request.headers.get("authorization", anthropic).partition(" ")
        key, role = key.strip(), ""
        if key == self.secret:
            name, _, role = request.headers.get("x-session-id", "").partition(".")
            key = f"{key}-{name}"
        if scheme.lower() == "bearer" and (session := self._sessions.get(key)):
            return session, role
        if key.startswith(f"{self.secret}-"):
            raise gone()
        raise ApiError(401, "the proxy does not know this API key: use the one that the episode received")

    async def _bug(self, request: Request, error: Exception) -> Response:
        """Fail the session after a bug in the proxy, so that the run ends with it instead of blaming the agent."""
        self._of(request)[0].fail(AsyncRLError(f"a bug in the proxy: {error!r}"))
        return _refusal(ApiError(500, f"a bug in the proxy: {error!r}"))


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket that is created with its protocol number.

    asyncio leaves Nagle's algorithm on for sockets without one. A response is sent in two parts, of which the second
    would then be delayed by 40 ms.
    """
    (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)  # from here on, connections wait until the server is up
    except OSError as error:
        listening.close()
        remedy = (
            f"The proxy cannot listen on {host}:{port} ({error.strerror}): choose another port, or 0 for a free one."
        )
        field, value = ("port", port) if error.errno == errno.EADDRINUSE else ("host", host)
        raise ConfigError(f"agent_params.{field}", value, remedy) from None
    return listening


async def _while_wanted(session: ProxySession, role: str, request: Request, handle: Handle) -> Response:
    """Handle a request, and cancel it when its client disconnects. Raises ApiError, or ClientDisconnect."""
    watching: asyncio.Task[None] | None = None
    left = False

    async def watch(task: asyncio.Task[Any]) -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    try:
        with session.call(role) as task:
            body = await _body(request) if request.method == "POST" else {}
            watching = asyncio.create_task(watch(task))
            return await handle(session, body)
    except asyncio.CancelledError:
        if not left:
            raise
        raise ClientDisconnect from None
    finally:
        if watching:
            watching.cancel()


async def _body(request: Request) -> Body:
    """Read the request body as a JSON object. Raises ApiError, or ClientDisconnect."""
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MOST_BYTES:
            raise ApiError(413, f"a body may have {MOST_BYTES} bytes")
    try:
        body = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    if tool_calls.nested_too_deep(body):
        most = tool_calls.MOST_NESTED
        raise ApiError(400, f"the body nests lists and objects more than {most} deep: send it flatter")
    return body


async def _chat(session: ProxySession, body: Body) -> Response:
    return _sent(session, await session.chat(body), "chat")


async def _complete(session: ProxySession, body: Body) -> Response:
    return _sent(session, await session.complete(body), "text")


async def _responses(session: ProxySession, body: Body) -> Response:
    return _in_form(await session.chat(responses_api.as_chat(body)), body, responses_api)


async def _messages(session: ProxySession, body: Body) -> Response:
    return _in_form(await session.chat(messages_api.as_chat(body)), body, messages_api)


async def _count_tokens(session: ProxySession, body: Body) -> Response:
    return _json({"input_tokens": session.count(messages_api.as_chat(body))})


async def _reward(session: ProxySession, body: Body) -> Response:
    session.take_reward(body)
    return _json({})


async def _models(session: ProxySession, body: Body) -> Response:
    return _json({"object": "list", "data": [MODEL]})


async def _model(session: ProxySession, body: Body) -> Response:
    return _json(MODEL)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _refusal(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))


def _sent(session: ProxySession, answer: ApiResponse, kind: Kind) -> Response:
    if answer.wanted.stream:
        return Response(answer.events(kind, session.template), media_type="text/event-stream")
    return Response(answer.whole(kind, session.template), media_type="application/json")


def _in_form(answer: ApiResponse, body: Body, form: ModuleType) -> Response:
    if answer.wanted.stream:
        return Response(form.events(answer, body), media_type="text/event-stream")
    return _json(form.whole(answer, body))


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def _refusal(refused: ApiError) -> Response:
    return _json(refused.body(), refused.status, {"x-should-retry": "false"})  # OpenAI clients honour it
