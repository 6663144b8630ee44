"""Encoding of the values exchanged between tests and tested code, as JSON. Sent into sandboxes as text: stdlib only.

Plain data is sent by value and arrives as objects of builtin and standard-library types, so that no `__eq__`,
`__bool__` or subclass of the tested code runs on the side of the tests. Any other object stays where it is and is sent
as a number.
"""

from __future__ import annotations

import decimal
import fractions
from collections.abc import Callable
from typing import Any

KEPT = "kept"
_SCALARS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bool": (bool, bool, bool),
    "int": (int, lambda value: hex(int(value)), lambda content: int(content, 16)),  # hex: no digit limit
    "float": (float, float.hex, float.fromhex),
    "str": (str, str.__str__, str),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
}
_ORDERED = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_WRITTEN = {"Decimal": decimal.Decimal, "Fraction": fractions.Fraction}


class Caught:
    """Context manager that catches whatever is raised, to be reported to the other side."""

    error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return True


def pack(value: Any, keep: Callable[[Any], list[Any]]) -> list[Any]:
    """Return [kind, content]; `keep` returns the same for an object that is not plain data."""
    for name, (scalar, content, _) in _SCALARS.items():  # a subclass, such as an IntEnum, becomes its base type
        if isinstance(value, scalar):
            return [name, content(value)]
    if value is None:
        return ["None", None]
    for name, kind in _ORDERED.items():
        if isinstance(value, kind):
            return [name, [pack(one, keep) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[pack(key, keep), pack(one, keep)] for key, one in value.items()]]
    if isinstance(value, complex):
        return ["complex", [value.real.hex(), value.imag.hex()]]
    if isinstance(value, range):
        return ["range", [pack(one, keep) for one in (value.start, value.stop, value.step)]]
    for name, number in _WRITTEN.items():
        if isinstance(value, number):
            return [name, str(value)]
    if hasattr(value, "tolist") and not isinstance(value, type):  # numpy's arrays and scalars
        return pack(value.tolist(), keep)
    return keep(value)


def unpack(packed: Any, kept: Callable[[int], Any]) -> Any:
    """Invert `pack`; `kept` returns the object of a number. A malformed value may raise anything."""
    kind, content = packed
    if kind == KEPT:
        return kept(content)
    if kind == "None":
        return None
    if kind in _SCALARS:
        return _SCALARS[kind][2](content)
    if kind in _ORDERED:
        return _ORDERED[kind](unpack(one, kept) for one in content)
    if kind == "dict":
        return {unpack(key, kept): unpack(one, kept) for key, one in content}
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "range":
        return range(*(unpack(one, kept) for one in content))
    return _WRITTEN[kind](content)
