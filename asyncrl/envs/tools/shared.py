"""What episodes share: sandboxes and servers, made when the first needs one, ended with the event loop's work.

An environment is made anew for each episode from names and numbers alone, so what outlives it stands here, by the
specification that it was made from.
"""

from __future__ import annotations

import asyncio
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


class Closing(Protocol):
    """Something that is ended."""

    async def close(self) -> None: ...


T = TypeVar("T", bound=Closing)
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


def sandboxes(spec: Mapping[str, Any]) -> SandboxBackend:
    """The backend of a specification, shared:

    {"use": "asyncrl.envs.sandbox.local:LocalSandboxes", "limits": {"seconds": 5}, "warm": 4}

    `use` is an import path, `limits` those of a sandbox, the rest arguments of the backend. Raises ConfigError."""
    check_sandboxes(spec)
    return shared("sandboxes", spec, lambda: _backend(spec))


def check_sandboxes(spec: Mapping[str, Any], field: str = "sandbox") -> None:
    """Raises ConfigError for a specification that makes none."""
    load(spec.get("use", LOCAL), f"{field}.use")
    try:
        load(LIMITS, f"{field}.limits")(**spec.get("limits", {}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{field}.limits", spec.get("limits"), f"{error}.") from None


def _backend(spec: Mapping[str, Any]) -> SandboxBackend:
    limits = load(LIMITS, "sandbox.limits")(**spec.get("limits", {}))
    rest = {name: value for name, value in spec.items() if name not in ("use", "limits")}
    try:
        backend: SandboxBackend = load(spec.get("use", LOCAL), "sandbox.use")(limits, **rest)
    except TypeError as error:
        raise ConfigError("sandbox", dict(spec), f"{error}.") from None
    return backend
