"""Sandboxes of this machine do what the protocol says, under each mechanism that there is."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.sandbox import local, start
from asyncrl.extensions.sandbox.local import LocalSandboxes
from asyncrl.extensions.sandbox.protocol import Limits, Sandbox, SandboxBackend, run_python
from asyncrl.extensions.sandbox.session import LocalSandbox
from tests.extensions.sandbox.machine import (
    DEADLINE,
    backend,
    kinds,
    leaves_nothing,
    needs_bubblewrap,
    needs_readable_python,
    processes,
    until,
    with_a_sandbox,
)
from tests.extensions.sandbox.ways import Kind

pytestmark = pytest.mark.integration
__all__ = ["leaves_nothing"]


@kinds
def test_program_gets_its_input_and_its_outcome_is_whole(kind: Kind) -> None:
    async def test(sandbox: Sandbox) -> None:
        source = "import sys; data = sys.stdin.buffer.read(); print(len(data)); sys.stderr.write('é'); sys.exit(3)"
        outcome = await run_python(sandbox, source, stdin=b"x" * 1_000_000)
        assert (outcome.reason, outcome.exit_code) == ("exited", 3)
        assert (outcome.text, outcome.stderr) == ("1000000\n", "é".encode())
        outcome = await sandbox.run(["sh", "-c", "echo $GREETING $HOME; pwd"], env={"GREETING": "hello"})
        assert outcome.text == "hello /sandbox/home\n/sandbox/home\n"

    with_a_sandbox(kind, test)


@kinds
def test_files_stay_from_call_to_call_and_cross_both_ways(kind: Kind) -> None:
    async def test(sandbox: Sandbox) -> None:
        await sandbox.write("tests/in.txt", b"1 2 3")
        source = "print(sum(map(int, open('tests/in.txt').read().split())), file=open('out.txt', 'w'))"
        assert (await run_python(sandbox, source)).ok
        assert await sandbox.read("out.txt") == b"6\n"
        changes = "import os; open('tests/in.txt', 'a').write('x'); os.rename('tests', 'moved')"  # the guest owns them
        assert (await run_python(sandbox, changes)).ok
        assert await sandbox.read("moved/in.txt") == b"1 2 3x"
        with pytest.raises(FileNotFoundError):
            await sandbox.read("tests/in.txt")

    with_a_sandbox(kind, test)


@kinds
def test_command_that_cannot_run_ends_as_in_a_shell(kind: Kind) -> None:
    async def test(sandbox: Sandbox) -> None:
        await sandbox.write("text", b"no program")
        codes = {}
        for command in (["no-such-program"], ["./text"], ["/etc"], ["true", "x" * 200_000]):
            outcome = await sandbox.run(command)
            codes[command[0]] = outcome.exit_code
            assert outcome.reason == "exited"
            assert outcome.stderr
        assert codes == {"no-such-program": 127, "./text": 126, "/etc": 126, "true": 126}

    with_a_sandbox(kind, test)


@kinds
def test_signal_that_no_limit_sent_is_told(kind: Kind) -> None:
    async def test(sandbox: Sandbox) -> None:
        outcome = await sandbox.run(["sh", "-c", "kill -SEGV $$"])
        assert (outcome.reason, outcome.exit_code) == ("killed", -11)
        outcome = await sandbox.run(["python3", "-c", "print('x' * 10)", "unused"])  # and the next call is as ever
        assert outcome.ok

    with_a_sandbox(kind, test)


@kinds
def test_ordinary_programs_find_what_they_need(kind: Kind) -> None:
    source = """
import asyncio, getpass, multiprocessing, os, socket, subprocess, tempfile, threading
with socket.create_server(("127.0.0.1", 0)) as server:  # its own loopback works
    socket.create_connection(server.getsockname()).close()
with multiprocessing.get_context("fork").Pool(2) as pool:  # semaphores in /dev/shm
    assert pool.map(abs, [-1, -2]) == [1, 2]
with tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
assert subprocess.run(["ls", "/dev/null"], capture_output=True).returncode == 0
assert asyncio.run(asyncio.sleep(0, 5)) == 5
threads = [threading.Thread(target=print) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(os.urandom(8)) == 8
print(getpass.getuser(), socket.gethostname(), os.path.expanduser("~"))
"""

    async def test(sandbox: Sandbox) -> None:
        outcome = await run_python(sandbox, source)
        assert outcome.text.split() == ["guest", "sandbox", "/sandbox/home"], outcome
        outcome = await sandbox.run(["sh", "-c", "yes | head -n 1"])
        assert (outcome.text, outcome.stderr) == ("y\n", b"")  # SIGPIPE ends it

    with_a_sandbox(kind, test)


SPINNING_CHILDREN = """
import os, time
if os.fork() or os.fork(): time.sleep(60)
while True: pass
"""


@kinds
def test_each_limit_ends_a_call_with_its_own_reason(kind: Kind) -> None:
    limits = Limits(seconds=30.0, cpu_seconds=0.5, memory_mb=100, output_kb=1)
    ends = {
        "while True: pass": "cpu",
        "import time; time.sleep(60)": "timeout",
        "print('x' * 1025)": "output",
        "print('x' * 1023)": "exited",
        "held = bytes([1]) * (200 << 20)": "memory",
        SPINNING_CHILDREN: "cpu",
    }

    async def test(sandbox: LocalSandbox) -> None:
        for source, reason in ends.items():
            outcome = await sandbox.run(["python3", "-c", source], seconds=0.3 if reason == "timeout" else None)
            assert outcome.reason == reason or (reason == "memory" and b"MemoryError" in outcome.stderr), outcome
            assert len(outcome.stdout) <= 1024

    with_a_sandbox(kind, test, limits)


@kinds
def test_orphans_that_have_ended_take_no_room(kind: Kind) -> None:
    source = """
import os, time
def orphan():
    try:
        pid = os.fork()
    except OSError:
        return False
    if not pid:
        try:
            os.fork()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
count = 0
while count < 60:
    if orphan(): count += 1
    else: time.sleep(0.01)
print(count)
"""

    async def test(sandbox: LocalSandbox) -> None:
        assert (await run_python(sandbox, source)).text == "60\n"

    with_a_sandbox(kind, test, Limits(processes=8, seconds=50.0, cpu_seconds=50.0))


@kinds
def test_sandbox_is_clean_and_its_own(kind: Kind) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind) as opened:
            one, other = await opened.open(), await opened.open()
            await one.write("mine", b"x")
            assert (await one.run(["sh", "-c", "echo x > /tmp/mine; echo x > /dev/shm/mine"])).ok
            await one.close()
            for sandbox in (other, await opened.open()):
                assert (await sandbox.run(["ls", "-A", ".", "/tmp/", "/dev/shm/"])).text.split() == [
                    *(".:", "/dev/shm/:", *names_of_python_in("/dev/shm"), "/tmp/:", *names_of_python_in("/tmp"))
                ]

    asyncio.run(main())


def names_of_python_in(folder: str) -> list[str]:
    """Return what a sandbox shows in /tmp or /dev/shm because the Python of the tests is below it."""
    prefixes = {Path(os.path.realpath(prefix)) for prefix in (sys.prefix, sys.base_prefix)}
    return sorted({path.relative_to(folder).parts[0] for path in prefixes if path.is_relative_to(folder)})


REPLACES_ITS_PYTHON = """
import os, shutil, sys
def refused(act, *arguments):
    try: act(*arguments)
    except OSError: return True
    return False
venv, top = sys.prefix, os.path.dirname(sys.prefix)
print(venv, *os.listdir("/tmp"), *os.listdir(top))
print(refused(os.rename, top, top + "-away"), refused(os.mkdir, top + "/other"), refused(os.mkdir, venv + "/other"))
print(refused(shutil.rmtree, top), os.path.exists(venv + "/bin/python3"))
"""


@kinds
@pytest.mark.parametrize("where", ["/tmp", "/dev/shm"])
def test_python_below_tmp_runs_and_tmp_is_still_writable(
    kind: Kind, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Path(tempfile.mkdtemp(dir=where, prefix="checkout "))
    venv = checkout / ".venv"
    venv.joinpath("bin").mkdir(parents=True)
    venv.joinpath("pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    venv.joinpath("bin", "python3").symlink_to(os.path.realpath(sys.executable))
    venv.joinpath("bubblewrap").symlink_to(Path(sys.prefix, "bubblewrap"))
    venv.joinpath("content").write_bytes(b"x" * (2 << 20))  # more than the sandbox may write
    checkout.joinpath("secret").write_text("not for guests")
    checkout.chmod(0o755)
    monkeypatch.setattr(sys, "prefix", str(venv))

    async def test(sandbox: LocalSandbox) -> None:
        assert (await sandbox.run(["sh", "-c", f"echo x > {where}/mine && cat {where}/mine"])).text == "x\n"
        outcome = await run_python(sandbox, REPLACES_ITS_PYTHON.replace("/tmp", where))
        first, *others = outcome.text.splitlines()
        assert first.startswith(f"{venv} "), outcome
        names = first.removeprefix(f"{venv} ")
        assert names in (
            f"mine {checkout.name} .venv",
            f"{checkout.name} mine .venv",
        )  # and nothing else of the checkout
        assert others == ["True True True", "True True"], outcome
        outcome = await run_python(sandbox, "import time; time.sleep(0.2)")  # long enough for a look at the disk
        assert outcome.ok, outcome

    try:
        with_a_sandbox(kind, test, Limits(disk_mb=1))
    finally:
        shutil.rmtree(checkout)


@kinds
def test_cancelled_call_is_killed_and_the_sandbox_goes_on(kind: Kind) -> None:
    async def test(sandbox: LocalSandbox) -> None:
        for source in ("import time; time.sleep(600)", "while True: pass"):
            running = asyncio.ensure_future(sandbox.run(["python3", "-c", source, "attack-of-a-test"]))
            await until(lambda: any("attack-of-a-test" in command for command in processes().values()))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert (await run_python(sandbox, "import os; print(os.listdir('/proc').count('1'))")).text == "1\n"
            assert not any("attack-of-a-test" in command for command in processes().values())

    with_a_sandbox(kind, test)


@kinds
def test_warm_sandboxes_are_made_beside_and_given_out_once(kind: Kind) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind, warm=3) as opened:
            await opened.describe()
            await until(lambda: len(opened._ready) == 3)
            given = [await opened.open() for _ in range(5)]
            assert len(set(given)) == 5
            for number, sandbox in enumerate(given):
                await sandbox.write("number", str(number).encode())
            assert [await sandbox.read("number") for sandbox in given] == [b"0", b"1", b"2", b"3", b"4"]
            await until(lambda: len(opened._ready) == 3)

    asyncio.run(main())


@kinds
def test_closed_sandbox_fails_typed_and_may_be_closed_again(kind: Kind) -> None:
    async def test(sandbox: LocalSandbox) -> None:
        running = asyncio.ensure_future(sandbox.run(["sleep", "60"]))
        await asyncio.sleep(0)
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(EpisodeFailed, match="sandbox: the sandbox was closed"):
            await running
        with pytest.raises(EpisodeFailed, match="sandbox: the sandbox was closed"):
            await sandbox.run(["true"])

    with_a_sandbox(kind, test)


def test_unmet_demand_is_refused_with_what_there_is() -> None:
    async def main() -> None:
        async with backend("unsafe", require=["network", "files"]) as opened:
            with pytest.raises((ConfigError, EpisodeFailed)) as caught:
                await asyncio.wait_for(opened.open(), DEADLINE)
            if isinstance(caught.value, ConfigError):  # else the Python of the tests is for root's eyes only
                assert "This machine lacks files" in str(caught.value)
                assert "NOT PROTECTED" in str(caught.value)

    asyncio.run(main())


@pytest.fixture
def no_bubblewrap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap is missing, or fails."""
    found = None if request.param == "missing" else ("/bin/false", {})
    monkeypatch.setattr("asyncrl.extensions.sandbox.bubblewrap.find", lambda: found)


@pytest.mark.parametrize("no_bubblewrap", ["missing", "fails"], indirect=True)
@pytest.mark.usefixtures("no_bubblewrap")
def test_nothing_runs_without_isolation_unless_that_is_said() -> None:
    async def main() -> None:
        sandboxes = LocalSandboxes()
        with pytest.raises(
            ConfigError,
            match=r"(?s)allow_unsafe: got False.* cannot isolate code of the model: bubblewrap: .*allow_unsafe=true",
        ):
            await asyncio.wait_for(sandboxes.open(), DEADLINE)
        await sandboxes.close()

    asyncio.run(main())


@pytest.mark.parametrize("no_bubblewrap", ["missing", "fails"], indirect=True)
@pytest.mark.usefixtures("no_bubblewrap")
def test_allowed_programs_run_and_gaps_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/usr")  # everybody may read that Python
    monkeypatch.setattr(sys, "base_prefix", "/usr")

    async def main() -> None:
        sandboxes: SandboxBackend = LocalSandboxes(allow_unsafe=True)
        try:
            told = await sandboxes.describe()  # type: ignore[attr-defined]
            assert (told.kind, told.isolated) == ("unsafe", False)
            assert {"files", "kill", "disk"} <= told.lacks.keys()
            sandbox = await asyncio.wait_for(sandboxes.open(), DEADLINE)
            outcome = await run_python(sandbox, "import os; print(os.getuid())")
            assert (int(outcome.text) == os.getuid()) == (os.getuid() != 0)
        finally:
            await sandboxes.close()

    asyncio.run(main())


@needs_bubblewrap
@needs_readable_python
def test_unforbiddable_namespaces_are_done_without() -> None:
    """An older bubblewrap, or one in a container, refuses --disable-userns."""
    ways = [way for way in start.ways(False)[0] if way.own_uid != "programs"]
    assert [("--disable-userns" in way.users) for way in ways] == [True, False]
    wrong = dataclasses.replace(ways[0], users=[*ways[0].users, "--no-such-option"])

    async def main() -> None:
        with patch.object(local, "ways", lambda _: ([wrong, ways[1]], "")):
            sandboxes = LocalSandboxes(require=["network", "kill"])
            try:
                assert (await asyncio.wait_for((await sandboxes.open()).run(["true"]), DEADLINE)).ok
            finally:
                await sandboxes.close()

    asyncio.run(main())


@needs_bubblewrap
def test_closed_backend_takes_its_sandboxes_along_and_opens_none() -> None:
    async def main() -> None:
        sandboxes = LocalSandboxes(warm=2)
        sandbox = await asyncio.wait_for(sandboxes.open(), DEADLINE)
        await sandboxes.close()
        await sandboxes.close()
        assert processes() == {}
        with pytest.raises(EpisodeFailed, match="sandbox: the backend of the sandbox was closed"):
            await sandbox.run(["true"])
        with pytest.raises(EpisodeFailed, match="sandbox: the backend is closed"):
            await sandboxes.open()
        await sandbox.close()

    asyncio.run(main())


assert sys.platform == "linux"


@kinds
def test_a_sandbox_that_has_just_become_ready_is_counted_once(kind: Kind) -> None:
    """Until the loop has called back, its task is among those that make sandboxes."""

    async def main() -> None:
        async with asyncio.timeout(DEADLINE), backend(kind, warm=1) as opened:
            await opened.describe()
            await until(lambda: len(opened._ready) == 1)
            ended = asyncio.ensure_future(asyncio.sleep(0))
            await ended
            opened._filling.add(ended)
            await opened.open()
            await until(lambda: len(opened._ready) == 1)

    asyncio.run(main())
