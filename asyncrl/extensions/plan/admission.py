"""The rollout process's part in plan.elastic: the route with which the pilot changes a run in progress.

POST /admission {"lead": n, "max_running_groups": n}    change either
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from asyncrl.extension import RolloutHooks
from asyncrl.rollout.server import RolloutServer


class _Admission(msgspec.Struct):
    """Body of the request."""

    lead: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_running_groups: Annotated[int, msgspec.Meta(ge=1)] | None = None


class AdmissionRoute(RolloutHooks):
    """Adds the route."""

    def routes(self, server: RolloutServer, status: Callable[[], Mapping[str, Any]]) -> Sequence[Route]:
        """Return the route."""

        async def admission(request: Request) -> Response:
            try:
                wanted = msgspec.json.decode(await request.body(), type=_Admission)
                await server.groups.adjust(wanted.lead, wanted.max_running_groups)
            except (msgspec.MsgspecError, ValueError) as error:  # ValueError: a lead above the staleness bound
                return PlainTextResponse(f"/admission takes lead >= 0 and max_running_groups >= 1: {error}", 400)
            return Response()

        return [Route("/admission", server.guarded(admission), methods=["POST"])]
