"""The process that forks ranks: it has imported torch and Megatron and done nothing else. Importing them takes four
seconds of a core for every rank, and there are a hundred ranks in the tests.

    python -m tests.integration.ranks.zygote [FILE]

With FILE it forks nothing, and executes the order in it as the only rank.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.integration.ranks import Order

PRELOADED = (
    *("asyncrl.trainer.policy", "asyncrl.trainer.sharded", "asyncrl.weights.export"),  # with most of Megatron
    "tests.integration.updates",  # with pytest, hydra and httpx, which several functions need
)


def serve(prepare: Callable[[], None] = lambda: None) -> None:
    """Execute orders until the tests end. `prepare` runs between the CPU shim and the import of Megatron."""
    from asyncrl import import_hooks
    from asyncrl.platforms import here

    here().prepare_trainer()
    prepare()

    for module in PRELOADED:
        importlib.import_module(module)

    import_hooks.done()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not be taken for an answer
    for line in sys.stdin:
        answers.write(_run(pickle.loads(Path(line.strip()).read_bytes())) + "\n")
        answers.flush()


def _run(order: Order) -> str:
    ranks = [_fork(order, rank) for rank in range(order.world)]
    deadline, left, outcome = time.monotonic() + order.timeout, set(ranks), "done"
    while left and outcome == "done":
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                if status:
                    outcome = f"rank {ranks.index(pid)} ended with {os.waitstatus_to_exitcode(status)}"
        if time.monotonic() > deadline:
            outcome = f"{len(left)} ranks were still at work after {order.timeout:.0f} s"
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return outcome


def _fork(order: Order, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(order.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        order.call(rank)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        for child in multiprocessing.active_children():  # such as the process of a queue of Megatron's writer
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def be_the_only_rank(file: Path) -> None:
    """Execute the order in a file."""
    from asyncrl.platforms import here

    here().prepare_trainer()
    order: Order = pickle.loads(file.read_bytes())
    order.call(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_the_only_rank(Path(sys.argv[1]))
    else:
        serve()
