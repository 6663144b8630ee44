"""Torch's compiler is imported only when something is compiled."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asyncrl.extensions.cpu import compiler

ENGINE = """
import sys, torch
from asyncrl.extensions.cpu import sglang_shim
sglang_shim._without_compiler(torch)

@torch.compile(dynamic=True)
@torch._dynamo.allow_in_graph
@torch.compiler.disable
def double(x):
    return 2 * x

assert double(torch.ones(1)) == 2
import transformers.masking_utils
"""
TRAINER = """
import sys, torch
from asyncrl import platforms
platforms.here().prepare_trainer()
import asyncrl.trainer.policy
"""
BOTH = """
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight])
torch.cat([weight, weight.to("meta").new_zeros(0, device="cpu")]).sum().backward()
torch.cat([torch.empty(1, device="meta"), torch.empty(1, device="meta")])
optimizer.step()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
stub = torch._dynamo
assert "torch._dynamo.convert_frame" not in sys.modules, "the compiler was imported"
assert torch._dynamo.optimize.__module__ == "torch._dynamo.eval_frame"
assert torch._dynamo is sys.modules["torch._dynamo"] is not stub
assert stub.optimize is torch._dynamo.optimize
"""


COMPILES = """
assert torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1)) == 2
from torch._dynamo import convert_frame, utils
assert utils.dynamo_timed is convert_frame.dynamo_timed and utils.__spec__.origin == utils.__file__
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex is TransformGetItemToIndex
"""
FIRST = ("", "import torch._dynamo.utils\n", "import torch._dynamo.testing\n", "import transformers.masking_utils\n")
FORKS = """
import os, traceback
for program in sys.argv[1:]:
    if not (child := os.fork()):
        try:
            exec(program, globals())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, program
"""


@pytest.mark.parametrize(
    ("program", "rest"),
    [
        pytest.param(ENGINE, [BOTH], id="engine"),
        pytest.param(TRAINER, [BOTH, *(first + COMPILES for first in FIRST)], id="trainer"),
    ],
)
def test_cpu_process_imports_the_compiler_only_when_needed(program: str, rest: list[str]) -> None:
    """A trainer can still compile: whatever is imported first, no module exists twice. Each is a fork of the same."""
    env = {**os.environ, "TORCHDYNAMO_DISABLE": "1" if program is ENGINE else "0"}
    command = [sys.executable, "-c", program + FORKS, *rest]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr


def test_decorators_are_unchanged_with_and_without_arguments() -> None:
    def function() -> None: ...

    assert compiler.unchanged(function) is function
    assert compiler.unchanged(dynamic=True)(function) is function
