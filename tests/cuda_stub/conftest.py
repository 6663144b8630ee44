"""Tests of the CUDA path on a machine without a GPU: `make cuda-stub`. No other target collects them."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if "cuda_stub" in os.environ.get("LD_PRELOAD", "") else ["test_*.py"]

PATIENCE = 1500.0
"""Seconds for one process on busy cores."""


def _called(connection: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        connection.send((True, function(*arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


@pytest.fixture(scope="session")
def apart() -> Callable[..., Any]:
    """Call a function in a new process, and return what it returns. Processes start as copies of one that has imported
    torch and Megatron."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cuda_stub.loaded"])

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        here, there = context.Pipe()
        process = context.Process(target=_called, args=(there, function, arguments))
        process.start()
        there.close()
        try:
            assert here.poll(PATIENCE), f"no answer in {PATIENCE} seconds"
            good, found = here.recv()
        except EOFError:
            pytest.fail("the process ended without an answer")
        finally:
            process.kill()
            process.join()
        if not good:
            pytest.fail(found, pytrace=False)
        return found

    return call


@pytest.fixture
def step(apart: Callable[..., Any], tmp_path: Path) -> Callable[[Any], dict[str, Any]]:
    """Run a case of step.py."""
    from tests.cuda_stub.step import report

    return lambda case: apart(report, case, tmp_path / f"model-{case.rank}")
