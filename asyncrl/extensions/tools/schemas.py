"""Check of a call's arguments against the tool's schema, and the process that checks where that can take long.

A model chooses the arguments, so it can choose those that take forever: `^(a+)+$` and a row of a's, 3,000 objects that
must be unique. Python's `re` also holds the interpreter's lock, so a thread would not help. Schemas with such keywords
are therefore checked in a process, whose CPU time for each check is limited: a busy machine changes no verdict.

in     {"json": {"arguments": object, "schema": object} as JSON}, since msgpack has neither all numbers nor all texts
out    {"wrong": how the arguments violate the schema or "", "schema": what is wrong with the schema or ""}
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry
from referencing.exceptions import Unresolvable

from asyncrl.extensions.children.processes import framed, messages

MEMORY, CPU_SECONDS = 2 << 30, 2.0
MOST_CHARS = 4000
"""Characters of a message, which repeats the argument."""
SLOW = {
    "pattern",
    "patternProperties",
    "uniqueItems",
    "multipleOf",
    "$ref",
    "$dynamicRef",
    "unevaluatedItems",
    "unevaluatedProperties",
}
"""Keywords of draft 2020-12 whose check can take more than time linear in the arguments, or raise."""


def is_linear(schema: Any) -> bool:
    """Return whether a schema has none of the SLOW keywords, so that its check is short for any arguments."""
    if isinstance(schema, dict):
        return SLOW.isdisjoint(schema) and all(map(is_linear, schema.values()))
    return not isinstance(schema, list) or all(map(is_linear, schema))


def check(arguments: dict[str, Any], schema: dict[str, Any]) -> dict[str, str]:
    """Return what is wrong, in the form of the module's docstring. Nothing that the schema refers to is fetched."""
    try:
        error = best_match(Draft202012Validator(schema, registry=Registry()).iter_errors(arguments))
    except Unresolvable as unresolved:
        return {"wrong": "", "schema": f"it has an unknown reference: {unresolved}"}
    except (re.error, RecursionError) as failed:
        return {"wrong": "", "schema": f"{type(failed).__name__}: {failed}"[:MOST_CHARS]}
    except MemoryError:
        return {"wrong": "arguments: they are too large to be checked", "schema": ""}
    except ArithmeticError as failed:  # multipleOf of a number beyond those of floating point
        return {"wrong": f"arguments: a number is too large ({failed})", "schema": ""}
    if error is None:
        return {"wrong": "", "schema": ""}
    place = f"argument {'.'.join(map(str, error.absolute_path))}" if error.absolute_path else "arguments"
    message = error.message
    if len(message) > MOST_CHARS:  # what is wanted stands at its end
        message = f"{message[: MOST_CHARS // 2]} ... {message[-MOST_CHARS // 2 :]}"
    return {"wrong": f"{place[:MOST_CHARS]}: {message}", "schema": ""}


def main() -> None:
    """Answer requests until the other side closes the pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the run, which closes the pipe
    for request in messages(sys.stdin.buffer):
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process, also inside of `re`
        found = check(**json.loads(request["json"]))
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.buffer.write(framed({name: text.encode(errors="replace").decode() for name, text in found.items()}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
