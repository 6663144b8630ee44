"""What episodes share: sandboxes and servers, made when the first needs one, ended with the event loop's work.

An environment is made anew for each episode from names and numbers alone, so what outlives it stands here, by the
specification that it was made from.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from asyncrl.errors import ConfigError
from asyncrl.imports import load

if TYPE_CHECKING:
    from asyncrl.envs.sandbox.protocol import SandboxBackend

LOCAL = "asyncrl.envs.sandbox.local:LocalSandboxes"
LIMITS = "asyncrl.envs.sandbox.protocol:Limits"


class Closable(Protocol):
    """Something that is ended."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Closable)
_held: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bytes, Any]] = WeakKeyDictionary()


def shared(kind: str, spec: Any, make: Callable[[], T]) -> T:
    """The one of this kind and specification in the running event loop."""
    held = _held.setdefault(asyncio.get_running_loop(), {})
    key = msgspec.json.encode([kind, spec], order="deterministic")
    if key not in held:
        held[key] = make()
    found: T = held[key]
    return found


async def close_shared() -> None:
    """End all that the running event loop holds: after the last episode. Raises what the first end has raised, after
    all."""
    held = _held.pop(asyncio.get_running_loop(), {})
    ended = await asyncio.gather(*(one.close() for one in held.values()), return_exceptions=True)
    for error in ended:
        if error is not None:
            raise error


def sandboxes(path: str, params: Mapping[str, Any]) -> SandboxBackend:
    """The backend at an import path, made with these arguments, one for all who ask for the same; `limits` are those of
    a sandbox, by name. Raises ConfigError."""
    made = _backend(path, params, "sandbox")
    return shared("sandboxes", [path, params], made)


def check_sandboxes(path: str, params: Mapping[str, Any], field: str) -> None:
    """Raises ConfigError for `field`, or `field`_params, when there is no such backend. Nothing is started."""
    _backend(path, params, field)()


def _backend(path: str, params: Mapping[str, Any], field: str) -> Callable[[], SandboxBackend]:
    kind, given = load(path, field), dict(params)
    try:
        if "limits" in given:
            given["limits"] = load(LIMITS, f"{field}_params")(**given["limits"])
        inspect.signature(kind).bind(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}_params", dict(params), f"{path} does not take them: {error}.") from None
    return lambda: kind(**given)
