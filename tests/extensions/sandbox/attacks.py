"""Programs that attack a sandbox, and how each call must end.

A program prints "escaped" and the reason if it got what it must not have. It uses the standard library only.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.extensions.sandbox.protocol import Limits, Outcome, Reason, Sandbox

LIMITS = Limits(seconds=30.0, cpu_seconds=2.0, memory_mb=128, processes=16, file_mb=4, disk_mb=16, output_kb=64)
"""Of every sandbox that is attacked."""
MARK = "attack-of-a-test"
"""In the arguments of whatever an attack leaves running, so that it can be looked for on the host."""


@dataclass(frozen=True)
class Attack:
    """One."""

    name: str
    source: str
    ends: frozenset[Reason] = frozenset({"exited"})
    needs: frozenset[str] = frozenset()
    """Protections without which it may succeed."""

    async def on(self, sandbox: Sandbox, mark: str = MARK) -> Outcome:
        """Do it, and hold it to how it must end."""
        seconds = 3.0 if "timeout" in self.ends else None
        outcome = await sandbox.run(["python3", "-c", self.source, mark], seconds=seconds)
        assert outcome.reason in self.ends, (self.name, outcome)
        assert b"escaped" not in outcome.stdout, (self.name, outcome)
        if outcome.reason == "exited":
            assert (outcome.exit_code, outcome.text) == (0, "held\n"), (self.name, outcome)
        assert max(len(outcome.stdout), len(outcome.stderr)) <= LIMITS.output_kb * 1024
        return outcome


def attack(name: str, source: str, ends: Iterable[Reason] = ("exited",), needs: Iterable[str] = ()) -> Attack:
    return Attack(name, textwrap.dedent(source), frozenset(ends), frozenset(needs))


# `refused(f, ...)` is true when the kernel does not let it; `held()` is what a program says that found no way.
HELP = """
    import os, signal, socket, subprocess, sys, time
    def refused(act, *arguments):
        try:
            act(*arguments)
        except OSError:
            return True
        return False
    def held(*refusals):
        print("held" if all(refusals) else f"escaped: {refusals}", flush=True)
"""


def probe(name: str, source: str, needs: Iterable[str]) -> Attack:
    """One that ends by itself and says what it found."""
    return attack(name, textwrap.dedent(HELP) + textwrap.dedent(source), needs=needs)


def network(address: tuple[str, int]) -> Attack:
    """`address`: of a server on the host's loopback."""
    return probe(
        "network",
        f"""
        def reach(family, kind, where):
            with socket.socket(family, kind) as end:
                end.settimeout(1.0)
                end.connect(where)
                if kind == socket.SOCK_DGRAM:
                    end.send(b"escaped")
        held(
            refused(reach, socket.AF_INET, socket.SOCK_STREAM, {address!r}),
            refused(reach, socket.AF_INET, socket.SOCK_STREAM, ("192.0.2.1", 80)),
            refused(reach, socket.AF_INET, socket.SOCK_DGRAM, ("1.1.1.1", 53)),
            refused(reach, socket.AF_INET6, socket.SOCK_STREAM, ("2001:db8::1", 80)),
            refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW),
            refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
            refused(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM),  # to the host of a virtual machine
        )
        """,
        ["network", "syscalls"],
    )


def files(secret: str, folder: str, python: str) -> Attack:
    """`secret`: a file of the host; `folder`: one of the host that everybody may write to; `python`: one that is shown,
    and that belongs to whoever runs us. Of a folder that leads to it the guest sees the next one's name alone."""
    hidden = ["/proc/1/root", "/proc/1/fd", "/home", "/sys", "/var", "/opt", "/run", "/old"]
    ways = {path: [python[len(path) + 1 :].partition("/")[0]] for path in hidden if python.startswith(f"{path}/")}
    return probe(
        "files",
        f"""
        def read(path):
            with open(path, "rb") as file:
                file.read()
        def write(path):
            with open(path, "wb") as file:
                file.write(b"escaped")
        refused(os.symlink, {secret!r}, "link")
        refused(os.symlink, "/", "root")
        held(
            *(refused(read, "../" * depth + {secret[1:]!r}) for depth in range(12)),
            *(refused(read, "/.." * depth + {secret!r}) for depth in range(12)),
            *(refused(read, path) for path in (
                "link", "root" + {secret!r}, "/proc/1/root" + {secret!r}, "/proc/self/root" + {secret!r},
                "/proc/1/environ", "/proc/1/cwd", "/proc/1/mem", "/etc/shadow", "/dev/vda", "/proc/kcore",
                "/proc/1/fd/3")),
            *(refused(os.listdir, path) for path in {[path for path in hidden if path not in ways]!r}),
            *(os.listdir(path) == names for path, names in {ways!r}.items()),
            *(refused(write, path) for path in (
                {folder!r} + "/escaped", "/usr/escaped", "/etc/passwd", "/escaped", "/dev/escaped",
                {python!r} + "/escaped", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger",
                "/proc/1/oom_score_adj")),
            refused(os.mknod, "device", 0o60666, os.makedev(254, 0)),
            refused(os.chroot, "."),
            {{name for name in os.listdir("/proc") if name.isdigit()}} <= {{"1", str(os.getpid())}},
        )
        """,
        ["files"],
    )


SIGNALS = probe(
    "signals",
    """
    import ctypes, resource
    libc = ctypes.CDLL(None, use_errno=True)
    def trace(pid):
        if libc.ptrace(16, pid, None, None) == -1:  # PTRACE_ATTACH
            raise OSError(ctypes.get_errno(), "ptrace")
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)  # with kill -1 they come back to itself on some kernels
    for number in signal.Signals:
        refused(os.kill, 1, number)  # whether it is let through or not, nothing may come of it
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            refused(os.kill, -1, number)
    refused(os.kill, -1, signal.SIGKILL)
    refused(os.setpriority, os.PRIO_USER, 0, 19)
    held(
        refused(trace, 1),
        refused(resource.prlimit, 1, resource.RLIMIT_CPU, (0, 0)),
        refused(resource.prlimit, 1, resource.RLIMIT_NOFILE, (0, 0)),
        refused(os.setpriority, os.PRIO_PROCESS, 1, 19),
        refused(os.sched_setaffinity, 1, os.sched_getaffinity(0)),
        refused(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)),
    )
    """,
    ["signals", "syscalls"],
)
SECRETS = probe(
    "secrets",
    """
    found = [name for name in os.environ if "KEY" in name or "ASYNCRL" in name or "SECRET" in name]
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            for file in ("environ", "mem", "maps", "cmdline"):
                try:
                    with open(f"/proc/{name}/{file}", "rb") as text:
                        found += [file] * (b"not-for-guests" in text.read(1 << 20))
                except OSError:
                    pass
    held(not found)
    """,
    ["secrets"],
)
NAMESPACES = probe(
    "namespaces",
    """
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    def unshare(flags):
        if libc.unshare(flags):
            raise OSError(ctypes.get_errno(), "unshare")
    def syscall(*words):
        if libc.syscall(*words) < 0:
            raise OSError(ctypes.get_errno(), "syscall")
    def mount():
        if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None):
            raise OSError(ctypes.get_errno(), "mount")
    held(
        refused(unshare, 0x10000000), refused(unshare, 0x10020000), refused(unshare, 0x40000000), refused(mount),
        refused(os.setuid, 0), refused(os.setgroups, [0]),
        refused(syscall, 425, 1, 0),  # io_uring_setup
        refused(syscall, 428, -100, b"/", 1),  # open_tree
    )
    """,
    ["syscalls"],
)

FORK_BOMB = attack(
    "fork bomb",
    "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    ["timeout", "cpu", "processes", "memory"],  # whichever limit it reaches first
)
MANY_PROCESSES = attack(
    "many processes",
    """
    import os, time
    count = 1
    try:
        for _ in range(100):
            if not os.fork():
                time.sleep(60)
                os._exit(0)
            count += 1
    except OSError:
        pass
    print("held" if count <= 16 else f"escaped: {count}")
    """,
    ["exited", "processes"],
)
SPINNER = attack("spinner", "while True: pass", ["cpu", "timeout"])
SPINNERS = attack("spinners", "import os\nfor _ in range(3): os.fork()\nwhile True: pass", ["cpu", "timeout"])
SLEEPER = attack("sleeper", "import time; time.sleep(60)", ["timeout"])
STUBBORN = attack(
    "stubborn",
    """
    import signal, time
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
    time.sleep(60)
    """,
    ["timeout"],
)
STOPPED = attack("stopped", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ["timeout"])
EATER = attack(
    "eater",
    """
    held = []
    try:
        while True: held.append(bytes([len(held) % 256]) * (1 << 20))
    except MemoryError:
        held = []
    print("held")
    """,
    ["memory", "exited"],  # killed, or refused
)
EATERS = attack(
    "eaters",
    """
    import os, time
    for _ in range(7):
        if not os.fork(): break
    held = []
    for number in range(60):  # each below the limit
        held.append(bytes([number]) * (1 << 20))
    time.sleep(60)
    """,
    ["memory"],
)
DAEMON = attack(
    "daemon",
    f"""
    import os, subprocess, sys
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {MARK!r}])
        os._exit(0)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {MARK!r}], start_new_session=True)
    print("held")
    """,
)
FLOOD = """
import os
block = b"x" * (1 << 20)
for _ in range(100):
    written = 0
    while written < len(block):
        written += os.write({}, block[written:])
"""
FLOODS = [attack(f"flood of {end}", FLOOD.format(end), ["output"]) for end in (1, 2)]
QUIET = attack("closes its pipes", "import os, time\nfor end in (0, 1, 2): os.close(end)\ntime.sleep(60)", ["timeout"])
BINARY = attack("invalid text", "import os\nos.write(2, b'\\xff\\xfe\\x00')\nprint('held')")
BIG_FILE = attack(
    "big file",
    """
    import os
    try:
        with open("big", "wb") as file:
            for _ in range(1024): file.write(b"x" * (1 << 20))
    except OSError:
        print("held" if os.path.getsize("big") <= 4 << 20 else "escaped")
    try:
        os.truncate("big", 1 << 30)
        print("escaped")
    except OSError:
        os.unlink("big")
    """,
)
FULL_DISK = attack(
    "full disk",
    """
    import os, tempfile
    count, folder = 0, tempfile.gettempdir()
    try:
        for count in range(100):
            with open(f"{folder}/{count}", "wb") as file: file.write(b"x" * (1 << 20))
    except OSError:
        print("held" if count <= 16 else f"escaped: {count}")
    for name in filter(str.isdigit, os.listdir(folder)): os.unlink(f"{folder}/{name}")
    """,
    needs=["disk"],
)
MANY_FILES = attack(
    "many files",
    """
    import os
    count = 0
    try:
        for count in range(100_000): os.close(os.open(f"f{count}", os.O_CREAT))
    except OSError:
        pass
    for name in os.listdir("."): os.unlink(name)
    print("held" if count < 10_000 else f"escaped: {count}")
    """,
    ["exited", "disk", "timeout"],
    ["disk"],
)
CRASH = attack("crash", "import os\nos.abort()", ["killed"])
GENERAL = [
    MANY_PROCESSES,
    SPINNER,
    SLEEPER,
    STUBBORN,
    STOPPED,
    DAEMON,
    *FLOODS,
    QUIET,
    BINARY,
    BIG_FILE,
    MANY_FILES,
    CRASH,
]
HEAVY = [FORK_BOMB, SPINNERS, EATER, EATERS, FULL_DISK]
PROBES = [SIGNALS, SECRETS, NAMESPACES]

assert sys.version_info >= (3, 11)
