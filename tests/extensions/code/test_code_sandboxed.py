"""Code rewards in this machine's own sandboxes: code that is wrong, and would rather have no verdict than that one."""

from __future__ import annotations

import asyncio
import json

import pytest

from asyncrl.extensions.code.code_reward import CodeReward, CodeSettings
from asyncrl.extensions.sandbox import cgroups
from asyncrl.extensions.sandbox.protocol import Limits
from asyncrl.rewards import Score
from tests.extensions.sandbox.machine import backend, kinds_with_users, leaves_nothing, needs_bubblewrap
from tests.extensions.sandbox.ways import Kind
from tests.rewards.doubles import answer

pytestmark = pytest.mark.integration
__all__ = ["leaves_nothing"]
LIMITS = Limits(seconds=90.0, cpu_seconds=90.0, memory_mb=512, file_mb=64)
TESTS = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
RIGHT = "def add(a, b):\n    return a + b"
EVERYBODY = """
import ctypes, fcntl, os, resource, signal, socket
libc = ctypes.CDLL(None)
def each(do):
    for pid in [int(name) for name in os.listdir('/proc') if name.isdigit() and int(name) != os.getpid()]:
        try: do(pid)
        except Exception: pass
def input_signalled(pid):
    ours, theirs = socket.socketpair()
    fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
    fcntl.fcntl(ours, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
    theirs.send(b'x')
"""
REFUSALS = {
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "kills all that it may": "import os\nos.kill(-1, 9)",
    "stops all that it may": "import os, signal\nos.kill(-1, signal.SIGSTOP)",
    "kills everybody": EVERYBODY + "each(lambda pid: os.kill(pid, 9))",
    "stops everybody": EVERYBODY + "each(lambda pid: os.kill(pid, signal.SIGSTOP))",
    "terminates everybody": EVERYBODY + "each(lambda pid: os.kill(pid, signal.SIGTERM))",
    "kills process groups": EVERYBODY + "each(lambda pid: os.killpg(pid, 9))",
    "queues signals": EVERYBODY + "each(lambda pid: libc.sigqueue(pid, 9, None))",
    "kills by pidfd": EVERYBODY + "each(lambda pid: signal.pidfd_send_signal(os.pidfd_open(pid), 9))",
    "has input signalled": EVERYBODY + "each(input_signalled)",
    "takes the time": EVERYBODY + "each(lambda pid: resource.prlimit(pid, resource.RLIMIT_CPU, (0, 0)))",
    "takes the memory": EVERYBODY + "each(lambda pid: resource.prlimit(pid, resource.RLIMIT_AS, (1, 1)))",
    "takes the processor": EVERYBODY + "each(lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19))",
    "traces": EVERYBODY + "each(lambda pid: libc.ptrace(16, pid, 0, 0))",
    "writes noise": "import os\nos.write(4, b'\\xff{}\\n' * 9)",
    "writes what is no answer": "import os\nos.write(4, b'[]\\n' * 9)",
    "closes its pipes": "import os\nos.closerange(0, 9)",
}


def scored(kind: Kind, *answers: str) -> list[Score]:
    """Return the scores of programs that run concurrently."""

    async def main() -> list[Score]:
        async with asyncio.timeout(300), backend(kind, LIMITS, nested=True) as sandboxes:
            limits = {"seconds": 15.0, "total_seconds": 40.0, "memory_mb": 256}
            reward = CodeReward(CodeSettings.model_validate({"reward": "share", **limits}), sandboxes)
            made = [answer(f"```python\n{code}\n```", test_list=TESTS) for code in answers]
            return list(await asyncio.gather(*map(reward, made)))

    return asyncio.run(main())


@kinds_with_users
def test_wrong_program_cannot_refuse_its_verdict(kind: Kind) -> None:
    scores = dict(zip(REFUSALS, scored(kind, *REFUSALS.values()), strict=True))
    assert {name: (one.reward, one.parts["code/no_verdict"]) for name, one in scores.items()} == dict.fromkeys(
        REFUSALS, (0.0, 0.0)
    )


@kinds_with_users
def test_right_program_passes_and_may_use_files_and_processes(kind: Kind) -> None:
    busy = """
import multiprocessing, pathlib, subprocess, tempfile
def add(a, b):
    pathlib.Path("sum").write_text("x")
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    subprocess.run(["true"], check=True)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(len, ["ab", "c"]) and a + b
"""
    assert [one.reward for one in scored(kind, RIGHT, busy, RIGHT + "\n" + busy.replace("add", "other"))] == [1, 1, 1]


@needs_bubblewrap
def test_programs_are_tested_without_a_memory_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "bases", cgroups.Bases)
    pairs = json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]})

    async def main() -> Score:
        async with asyncio.timeout(300):
            reward = CodeReward(CodeSettings(tests="programs", seconds=15.0, total_seconds=40.0))
            try:
                return await reward(answer("```python\nprint(int(input()) * 2)\n```", input_output=pairs))
            finally:
                await reward.close()

    assert asyncio.run(main()).reward == 1.0
