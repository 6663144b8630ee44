"""The process that runs math_verify: one JSON line in, two out. It knows nothing of asyncrl.

math_verify's own time limits are signals, which work in a main thread alone, and which sympy or a long power in C
outlives (its issues 63 and 65). Here each stage has CPU seconds (ITIMER_PROF), not seconds of a clock: a busy machine
changes no score. Whoever spends them is ended by the kernel, in the midst of C code too; memory has a limit as well.

in     {"gold": text, "answer": text, "seconds": float}
out    {"stage": "answer"} once the gold answer has been read; then {"verdict": ..., "detail": ...}, one of
       equal, different
       unparsed      math_verify reads nothing in the answer
       error         it raised at the answer, where the gold answer does equal itself
       gold          the gold answer is not read, or does not equal itself
"""

from __future__ import annotations

import json
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

PROBE = [Integer(-271828)]
DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")  # \$36 is money


class Errors(logging.Handler):
    """What math_verify raises within itself: it takes that for "not equal", and only says so in its log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Its name alone: the text of an expression can take for ever."""
        if record.exc_info and record.exc_info[0]:
            self.last = record.exc_info[0].__name__


def read(text: str) -> list[Any]:
    """What math_verify reads in a text; without the text itself, so that two that it cannot read are not compared."""
    found: list[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=None)
    return found


def equal(gold: list[Any], found: list[Any]) -> bool:
    """Whether they are the same to math_verify."""
    return bool(verify(gold, found, timeout_seconds=None))


@lru_cache(maxsize=1024)
def gold_answer(text: str) -> list[Any]:
    r"""Empty when it is not read, or does not equal itself. A bare \sqrt{2} is taken as LaTeX, as data sets write it.

    It is compared with a number too: a power tower is worked out no sooner, and what that takes is not the answer's."""
    gold = read(text if DELIMITED.search(text) else f"${text}$")
    equal(gold, PROBE)
    return gold if equal(gold, gold) else []


def judge(request: dict[str, Any], tell: Callable[[dict[str, str]], None], errors: Errors) -> None:
    """Both stages of one request."""
    errors.last = ""
    limit(request["seconds"])
    gold = gold_answer(request["gold"])
    if not gold:
        return tell({"verdict": "gold", "detail": errors.last or "it is not read, or does not equal itself"})
    tell({"stage": "answer"})
    errors.last = ""
    limit(request["seconds"])
    found = read(request["answer"])
    same = equal(gold, found)
    verdict = "equal" if same else "error" if errors.last else "different" if found else "unparsed"
    return tell({"verdict": verdict, "detail": errors.last})


def limit(seconds: float) -> None:
    """CPU seconds from now on, and then SIGPROF, which ends the process; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Until the other side closes the pipe. The only argument: megabytes of address space."""
    memory = int(sys.argv[1]) << 20
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for the run, which closes the pipe
    errors, log = Errors(), logging.getLogger("math_verify")
    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(errors)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is no answer

    def tell(message: dict[str, str]) -> None:
        limit(0)
        answers.write(json.dumps(message) + "\n")

    equal(read("$x+1$"), read("$\\frac{x}{2}+2$"))  # what sympy imports for its first expression is nobody's time
    for line in sys.stdin:
        judge(json.loads(line), tell, errors)


if __name__ == "__main__":
    main()
