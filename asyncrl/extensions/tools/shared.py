"""Resources that episodes share: sandboxes and servers, created at first use and closed with the event loop's work.

Each episode creates its environment from names and numbers alone. What outlives an environment is kept here, by the
specification from which it was created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.user_code import check_arguments, load

if TYPE_CHECKING:
    from asyncrl.extensions.sandbox.protocol import SandboxBackend

LOCAL = "asyncrl.extensions.sandbox.local:LocalSandboxes"
LIMITS = "asyncrl.extensions.sandbox.protocol:Limits"


class Closable(Protocol):
    """Resource that can be closed."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Closable)
_held: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, Any]] = WeakKeyDictionary()


def shared(kind: str, spec: Any, make: Callable[[], T]) -> T:
    """Return the shared resource of this kind and specification in the running event loop."""
    held = _held.setdefault(asyncio.get_running_loop(), {})
    key = msgspec.json.encode([kind, spec], order="deterministic")
    if key not in held:
        held[key] = make()
    found: T = held[key]
    return found


async def close_shared() -> None:
    """Close all resources of the event loop, after the last episode. Raises the first error after closing all."""
    held = _held.pop(asyncio.get_running_loop(), {})
    ended = await asyncio.gather(*(one.close() for one in held.values()), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error


def sandboxes(path: str, params: Mapping[str, Any]) -> SandboxBackend:
    """Return the sandbox backend at an import path, built with these arguments and shared by all who ask for the same.
    `limits` are those of a sandbox, by name. Raises ConfigError."""
    made = _backend(path, params, "sandbox")
    return shared("sandboxes", [path, params], made)


def check_sandboxes(path: str, params: Mapping[str, Any], field: str) -> None:
    """Raise ConfigError for `field`, or `field`_params, if there is no such backend. Starts nothing."""
    _backend(path, params, field)()


def _backend(path: str, params: Mapping[str, Any], field: str) -> Callable[[], SandboxBackend]:
    kind, given = load(path, field), dict(params)
    try:
        if "limits" in given:
            given["limits"] = load(LIMITS, f"{field}_params")(**given["limits"])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}_params", dict(params), f"{path} rejects them: {error}.") from None
    check_arguments(kind, given, f"{field}_params", path)
    return lambda: kind(**given)
