"""Error responses of the proxy."""

from __future__ import annotations

from typing import Any

from asyncrl.errors import AsyncRLError

TYPES = {401: "authentication_error", 410: "session_closed", 503: "engine_error"}


class ApiError(AsyncRLError):
    """Raised to answer a request with this HTTP status and an error. `param` names the field of the request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.status, self._param, self._code = status, param, code
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """Return the error in the OpenAI API's format."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self._param, "code": self._code}}


def bad_field(param: str, value: object, remedy: str) -> ApiError:
    """Return a 400 error for one field, which states the field, the value and the remedy."""
    told = repr(value)
    told = told if len(told) <= 200 else f"{told[:200]}..."
    return ApiError(400, f"{param}: got {told}. {remedy}", param=param)
