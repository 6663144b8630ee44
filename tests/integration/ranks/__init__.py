"""Trainer ranks for tests that need no launcher: real processes with gloo between them, as torchrun would start them.

A test names a function of a module in this folder. Every rank calls it with the same arguments, and the test gets what
each of them returned. joining.py has what such functions share.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from asyncrl.network.ports import free_port

ROOT = Path(__file__).parents[3]
LAST = 4000  # characters of a failure's output


@dataclass(frozen=True)
class Order:
    """A function for ranks to call."""

    function: str
    """`module:name`. A module without a dot is one of this folder."""
    arguments: tuple[Any, ...]
    world: int
    timeout: float
    port: int
    folder: Path
    """Gets the order, the log of all ranks, and a file with the result of each."""

    def written(self) -> Path:
        """Write the order for the process that executes it, and return the file."""
        file = self.folder / "order"
        file.write_bytes(pickle.dumps(self))
        return file

    def call(self, rank: int) -> None:
        """Be one of the ranks: call the function, and leave what it returns for `results`."""
        size = str(self.world)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(module if "." in module else f"{__name__}.{module}"), name)
        (self.folder / f"{rank}.result").write_bytes(pickle.dumps(function(*self.arguments)))

    def log(self) -> str:
        """Return what the ranks printed."""
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def results(self) -> list[Any]:
        """Return what the ranks returned, in their order."""
        return [pickle.loads((self.folder / f"{rank}.result").read_bytes()) for rank in range(self.world)]


def run_ranks(function: str, *arguments: Any, world: int, timeout: float = 600.0) -> list[Any]:
    """Call FUNCTION ("module:name") in `world` ranks, and return what each of them returned. Raises AssertionError with
    what they printed when one fails."""
    zygote = _zygote()
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        order = Order(function, arguments, world, timeout, free_port("127.0.0.1"), Path(folder))
        zygote.stdin.write(f"{order.written()}\n")
        zygote.stdin.flush()
        outcome = zygote.stdout.readline().strip() or "the process that forks them died"
        assert outcome == "done", f"{function} with {world} ranks: {outcome}\n{order.log()[-LAST:]}"
        return order.results()


def run_on_gpu(function: str, *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """Call FUNCTION as `run_ranks` does, in a single rank on the first GPU. (A fork could not use CUDA.)"""
    with tempfile.TemporaryDirectory() as folder:
        order = Order(function, arguments, 1, timeout, free_port("127.0.0.1"), Path(folder))
        done = subprocess.run(
            [sys.executable, "-m", f"{__name__}.zygote", str(order.written())],
            env=_environment(CUDA_DEVICE_MAX_CONNECTIONS="1"),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{function}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-LAST:]}"
        return order.results()


@cache
def _zygote() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", os.environ.get("ASYNCRL_ZYGOTE", f"{__name__}.zygote")]
    environment = _environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}
