"""Trainer ranks for tests that need no launcher: real processes with gloo between them, as torchrun would start them.

They are forks of one process that has imported torch and Megatron and done nothing else. Importing them takes four
seconds of a core for every rank, and there are a hundred ranks in the tests.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

from asyncrl.network.ports import free_port

PRELOADED = (
    *("asyncrl.trainer.policy", "asyncrl.trainer.sharded", "asyncrl.weights.export"),  # with most of Megatron
    "tests.integration.updates",  # with pytest, hydra and httpx, which several scripts need
)
ROOT = Path(__file__).parents[2]
LAST = 4000  # characters of a failure's output


def run_ranks(script: str, *arguments: str, world: int, timeout: float = 600.0) -> None:
    """Run SCRIPT, relative to this folder, as `world` ranks. Raises AssertionError with what they printed when one
    fails."""
    zygote = _zygote()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    with tempfile.NamedTemporaryFile() as log:
        order = {
            "script": str(Path(__file__).parent / script),
            "arguments": arguments,
            "world": world,
            "port": free_port("127.0.0.1"),
            "log": log.name,
            "timeout": timeout,
        }
        zygote.stdin.write(json.dumps(order) + "\n")
        zygote.stdin.flush()
        outcome = zygote.stdout.readline().strip() or "the process that forks them died"
        text = log.read().decode(errors="replace")
    assert outcome == "done", f"{script} with {world} ranks: {outcome}\n{text[-LAST:]}"


def run_on_gpu(script: str, *arguments: str, timeout: float = 600.0) -> None:
    """Run tests/integration/SCRIPT as the only rank, on the first GPU. (A fork could not use CUDA.)"""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1")), "PYTHONPATH": path}
    command = [sys.executable, str(Path(__file__).parent / script), *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **rank, **meeting, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{script}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-LAST:]}"


@cache
def _zygote() -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", os.environ.get("ASYNCRL_ZYGOTE", "tests.integration.ranks")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(process.kill)
    return process


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
        answers.write(_run(json.loads(line)) + "\n")
        answers.flush()


def _run(order: dict) -> str:
    ranks = [_fork(order, rank) for rank in range(order["world"])]
    deadline, left, outcome = time.monotonic() + order["timeout"], set(ranks), "done"
    while left and outcome == "done":
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                if status:
                    outcome = f"rank {ranks.index(pid)} ended with {os.waitstatus_to_exitcode(status)}"
        if time.monotonic() > deadline:
            outcome = f"{len(left)} ranks were still at work after {order['timeout']:.0f} s"
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return outcome


def _fork(order: dict, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        size = str(order["world"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order["port"])}
        sys.argv = [order["script"], *order["arguments"]]
        runpy.run_path(order["script"], run_name="__main__")
        code = 0
    finally:
        if code:
            traceback.print_exc()
        for child in multiprocessing.active_children():  # such as the process of a queue of Megatron's writer
            child.kill()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
