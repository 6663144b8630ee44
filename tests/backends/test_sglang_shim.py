"""The import shim of engines on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

from asyncrl.backends.cpu import sglang_shim

PROGRAM = """
import sys, torch
from asyncrl.backends.cpu import sglang_shim
sglang_shim._without_compiler(torch)

@torch.compile(dynamic=True)
@torch._dynamo.allow_in_graph
@torch.compiler.disable
def double(x):
    return 2 * x

assert double(torch.ones(1)) == 2
stub = torch._dynamo
assert "torch._dynamo.convert_frame" not in sys.modules, "the compiler was imported"
assert torch._dynamo.optimize.__module__ == "torch._dynamo.eval_frame"
assert torch._dynamo is sys.modules["torch._dynamo"] is not stub
assert stub.optimize is torch._dynamo.optimize
"""


def test_an_engine_on_a_cpu_imports_the_compiler_only_when_something_needs_it() -> None:
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_decorators_are_unchanged_with_and_without_arguments() -> None:
    def function() -> None: ...

    assert sglang_shim._unchanged(function) is function
    assert sglang_shim._unchanged(dynamic=True)(function) is function
