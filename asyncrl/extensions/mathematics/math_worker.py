"""Process that runs math_verify: one message in, two out (children/processes.py).

math_verify's own timeouts are signals, which work only in a main thread and which sympy or a long power in C outlives
(its issues 63 and 65). Here each stage has a limit of CPU seconds (ITIMER_PROF) instead of wall-clock seconds, so that
a busy machine changes no score. The kernel ends a process that exceeds it, even inside C code; memory is limited as
well.

in     {"gold": text, "answer": text, "seconds": float}
out    {"stage": "answer"} once the gold answer has been read; then {"verdict": ..., "detail": ...}, one of
       equal, different
       unparsed      math_verify reads nothing in the answer
       error         it raised on the answer, whereas the gold answer does equal itself
       gold          the gold answer cannot be read, or does not equal itself
"""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from sympy import Integer

from asyncrl.extensions.children.processes import framed, messages

PROBE = [Integer(-271828)]
DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")  # \$36 is money


class Errors(logging.Handler):
    """Log handler that keeps the exceptions that math_verify swallows: it treats them as "not equal" and only logs
    them."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the exception's name only: formatting an expression can take forever."""
        if record.exc_info and record.exc_info[0]:
            self.last = record.exc_info[0].__name__


def read(text: str) -> list[Any]:
    """Return what math_verify parses from a text, without the text itself: two unparsable texts must not be compared as
    strings."""
    found: list[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def equal(gold: list[Any], found: list[Any]) -> bool:
    """Return whether math_verify considers them equal."""
    return bool(verify(gold, found, timeout_seconds=None))


@lru_cache(maxsize=1024)
def gold_answer(text: str) -> list[Any]:
    r"""Parse the gold answer; the result is empty if it cannot be read or does not equal itself. A bare \sqrt{2} is
    taken as LaTeX, as data sets write it.

    It is also compared with a number, because a power tower is only evaluated in a comparison, and its cost must not
    count against the answer.
    """
    gold = read(text if DELIMITED.search(text) else f"${text}$")
    equal(gold, PROBE)
    return gold if equal(gold, gold) else []


def judge(request: dict[str, Any], tell: Callable[[dict[str, str]], None], errors: Errors) -> None:
    """Process both stages of one request."""
    errors.last = ""
    limit(request["seconds"])
    gold = gold_answer(request["gold"])
    if not gold:
        return tell({"verdict": "gold", "detail": errors.last or "it cannot be parsed, or does not equal itself"})
    tell({"stage": "answer"})
    errors.last = ""
    limit(request["seconds"])
    found = read(request["answer"])
    same = equal(gold, found)
    verdict = "equal" if same else "error" if errors.last else "different" if found else "unparsed"
    return tell({"verdict": verdict, "detail": errors.last})


def limit(seconds: float) -> None:
    """Set the CPU seconds after which SIGPROF ends the process; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Serve requests until the other side closes the pipe. The only argument is the address space in megabytes."""
    memory = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the run, which closes the pipe
    errors, log = Errors(), logging.getLogger("math_verify")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(errors)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep what libraries print out of the answers

    def tell(message: dict[str, str]) -> None:
        limit(0)
        answers.write(framed(message))

    equal(read("$x+1$"), read("$\\frac{x}{2}+2$"))  # warm-up: sympy's imports must not count against an answer
    for request in messages(sys.stdin.buffer):
        judge(request, tell, errors)


if __name__ == "__main__":
    main()
