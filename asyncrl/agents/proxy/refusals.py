"""What a client reads where a request is not answered."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import AsyncRLError

TYPES = {401: "authentication_error", 410: "session_closed", 503: "engine_error"}


class Refused(AsyncRLError):
    """An answer of this status in place of a completion. `param` names the request's field."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self._param, self._code = status, param, code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """As the OpenAI API has it."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self._param, "code": self._code}}


def bad_field(param: str, value: object, remedy: str) -> Refused:
    """400 for one field, in the three parts that a user needs."""
    told = repr(value)
    told = told if len(told) <= 200 else f"{told[:200]}..."
    return Refused(400, f"{param}: got {told}. {remedy}", param=param)
