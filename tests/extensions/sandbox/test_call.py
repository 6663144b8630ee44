"""One call, without a sandbox around it: what is a fault and what an outcome, and why a call ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from asyncrl.extensions.sandbox.program import Settings, become
from tests.extensions.sandbox.machine import ROOT, settings


def began(settings: Settings, *command: str) -> tuple[int, str, str]:
    """Exit code, stderr and fault of a forked process that becomes this command."""
    (err, say), (fault, faulty), (empty, nothing) = os.pipe(), os.pipe(), os.pipe()
    os.close(nothing)
    root = os.open("/", os.O_RDONLY)
    if not (pid := os.fork()):
        become(settings, root, command, {}, (empty, say, say), faulty)
    for end in (say, faulty, empty, root):
        os.close(end)
    with open(err, errors="replace") as text, open(fault, errors="replace") as faults:
        said = text.read(), faults.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), *said


def test_failed_setup_is_a_fault_and_unrunnable_none() -> None:
    assert began(settings(), "true") == (0, "", "")
    assert began(settings(), "no-such-program") == (127, "no-such-program: No such file or directory\n", "")
    assert began(settings(), "/etc") == (126, "/etc: Permission denied\n", "")
    assert began(settings(joins=[2**20]), "true") == (1, "", "[Errno 9] Bad file descriptor")


def test_error_of_ours_ends_the_forked_process_and_is_a_fault() -> None:
    code, _, fault = began(settings(limits={}), "true")
    assert code == 1
    assert "KeyError" in fault


# In a process of its own: a call reaps every child there is.
CALL = """
import json, os, signal, socket, sys, time
from asyncrl.extensions.sandbox.call import Call
from tests.extensions.sandbox.machine import settings

script, late, seconds, stop = json.loads(sys.argv[1])
owner, ours = socket.socketpair()
home = os.open("/", os.O_RDONLY)
call = Call(settings(), home, ["sh", "-c", script], {}, seconds, stdin=b"x" * 300_000)
if late:  # it has ended before anybody looks
    os.waitid(os.P_PID, call.pid, os.WEXITED | os.WNOWAIT)
if stop:
    ours.send(b"stop")
reason = call.wait([owner.fileno()])
ended = call.end(reason)
print(json.dumps([ended.reason, ended.exit_code, *map(len, ended.outputs), len(os.listdir("/proc/self/fd"))]))
"""


def called(script: str, *, late: bool = False, seconds: float = 60.0, stop: bool = False) -> list[Any]:
    """Reason, exit code, and the lengths of what it wrote; holds that no descriptor is left open."""
    words = [sys.executable, "-c", CALL, json.dumps([script, late, seconds, stop])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *found, descriptors = json.loads(done.stdout)
    assert descriptors == 7  # 0 to 2, the socket's two ends, the folder, and the listing's own
    return found


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("printf 12345; printf 123 >&2; exit 3", ["exited", 3, 5, 3]),
        ("head -c 1024 /dev/zero", ["exited", 0, 1024, 0]),
        ("head -c 1025 /dev/zero", ["output", None, 1024, 0]),
        ("head -c 1025 /dev/zero >&2; exit 1", ["output", None, 0, 1024]),
        ("kill -TERM $$", ["killed", -15, 0, 0]),
        ("kill -XCPU $$", ["cpu", None, 0, 0]),
        ("sleep 60 & exit 0", ["exited", 0, 0, 0]),
        ("exec 0<&- 1>&- 2>&-; exit 4", ["exited", 4, 0, 0]),
    ],
)
def test_call_ends_with_its_reason_however_late_one_looks(script: str, found: list[Any], late: bool) -> None:
    assert called(script, late=late) == found


def test_call_ends_at_its_time_or_at_a_word() -> None:
    assert called("sleep 60", seconds=0.1) == ["timeout", None, 0, 0]
    assert called("sleep 60", stop=True) == ["killed", None, 0, 0]
