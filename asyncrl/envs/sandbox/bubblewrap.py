"""Bubblewrap: where its program is, and the command line with which it builds a sandbox and starts the worker in it.

What a program in the sandbox sees of the machine:

    /usr, /bin, /lib*, /sbin     read-only, the host's
    the Python that runs us      read-only, where the host has it: its base and its virtual environment. Below /tmp or
                                 /dev/shm, the folder there that leads to it is read-only too
    /etc                         a few files of the dynamic linker, and accounts that are made up
    /dev                         null, zero, full, random, urandom
    /proc                        that of its own pid namespace
    /sandbox                     writable, limited: home (where programs start), tmp (/tmp), shm (/dev/shm)
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.envs.sandbox.program import WRITABLE
from asyncrl.envs.sandbox.worker import WRITABLE_FOLDERS

HOME, TEMPORARY = f"{WRITABLE}/home", f"{WRITABLE}/tmp"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {
    "/tmp": TEMPORARY,
    "/dev/shm": f"{WRITABLE}/shm",
    "/dev/fd": "/proc/self/fd",
    **{f"/dev/{name}": f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))},
}
UID = 1000
"""Uid of programs, as they see it, where they do not have one of their own on the host."""
FILES = {
    "/etc/passwd": f"root:x:0:0::/:/bin/sh\nguest:x:{UID}:{UID}::{HOME}:/bin/sh\n",
    "/etc/group": f"root:x:0:\nguest:x:{UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
ISOLATED = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--clearenv"),
)
ONE_USER = ("--unshare-user", "--uid", str(UID), "--gid", str(UID))
"""Programs have the uid of the worker, which is that of the owner on the host."""
CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "SYS_PTRACE")
OWN_USERS = tuple(word for name in CAPABILITIES for word in ("--cap-add", f"CAP_{name}"))
"""For root: programs have a uid that nobody has. With these capabilities the worker starts them, ends them, counts
them and has their files."""
CODE = "/.worker"
"""Where the worker finds its code in a sandbox: this folder alone."""
UNPACKED = "bubblewrap/usr/bin/bwrap"
"""Where `make bubblewrap` puts the program, below the virtual environment."""


def find() -> tuple[str, dict[str, str]] | None:
    """Return the path of bwrap and the environment that it needs: that of the virtual environment, or the one on PATH;
    None if there is none."""
    unpacked = Path(sys.prefix, UNPACKED)
    if os.access(unpacked, os.X_OK):
        root = unpacked.parents[2]
        libraries = [str(path) for top in ("usr/lib", "lib") for path in sorted((root / top).glob("*-linux-*"))]
        return str(unpacked), {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
    found = shutil.which("bwrap")
    return (found, {}) if found else None


def python(code: str) -> list[str]:
    """Return the command that starts a worker whose code is below this folder; its settings are to be appended."""
    start = f"import sys; sys.path.insert(0, {code!r}); from asyncrl.envs.sandbox.worker import main; main()"
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", start]


def command(
    bwrap: str, users: Sequence[str], shown: Sequence[str], disk: int, *, files: Mapping[str, int], seccomp: int | None
) -> list[str]:
    """Return the words that start a worker; its settings are to be appended.

    users    ONE_USER, perhaps with --disable-userns, or OWN_USERS
    shown    paths of the host (see `shown`)
    disk     bytes of the writable part
    files    descriptors from which FILES are read
    seccomp  descriptor of the system-call filter
    """
    words = [bwrap, *ISOLATED, *users]
    inside = nested(shown)
    outer = [path for path in shown if path not in {item.source for item in inside}]
    for folder in sorted(set().union(*map(folders_above, [*outer, *files, *LINKS]))):
        words += ["--dir", folder]  # those that it makes unasked are for root alone
    for path in outer:
        words += ["--ro-bind", path, path]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--proc", "/proc", "--ro-bind", str(Path(__file__).parent), f"{CODE}/asyncrl/envs/sandbox"]
    words += ["--size", str(disk), "--tmpfs", WRITABLE]
    for name in WRITABLE_FOLDERS:
        words += ["--dir", f"{WRITABLE}/{name}"]
    tops = sorted({item.top for item in inside if item.top != item.target})
    for top in tops:
        words += ["--size", str(1 << 20), "--tmpfs", top]
    for item in inside:
        for folder in sorted(path for path in folders_above(item.target) if item.top in folders_above(path)):
            words += ["--dir", folder]
        words += ["--ro-bind", item.source, item.target]
    for top in tops:
        words += ["--remount-ro", top]
    for path, descriptor in files.items():
        words += ["--ro-bind-data", str(descriptor), path]
    for path, target in links().items():
        words += ["--symlink", target, path]
    words += ["--seccomp", str(seccomp)] if seccomp is not None else []
    return [*words, "--remount-ro", "/", "--", *python(CODE)]


def shown() -> list[str]:
    """Return files and folders of the host that are shown at their own place, none inside another."""
    wanted = [path for path in (*SYSTEM, *ETC) if Path(path).exists() and path not in links()]
    wanted += sorted({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    return [path for path in wanted if not folders_above(path) & set(wanted)]


def links() -> dict[str, str]:
    """Return symbolic links, by place: those of the root that are links on the host (/bin to usr/bin), and LINKS."""
    return {path: os.readlink(path) for path in SYSTEM if Path(path).is_symlink()} | LINKS


@dataclass(frozen=True)
class Nested:
    """A path of the host that is shown inside a writable folder, because the host has it below /tmp or /dev/shm.

    The first folder on the way to `target` is a mount of its own, and read-only. Otherwise a program, which owns the
    writable folder, could rename it and put another Python in its place. (A program with its worker's uid can still
    rename the writable folder itself, and so change what later calls of its own sandbox run.)
    """

    source: str
    target: str  # below /sandbox
    top: str  # the folder of the writable folder that holds it; `target` itself, if nothing is in between


def nested(shown: Sequence[str]) -> list[Nested]:
    """Return what has to be mounted inside the writable folders instead of at its own place."""
    found = []
    for path in shown:
        for link, folder in LINKS.items():
            if link in folders_above(path):
                inside = Path(path).relative_to(link)
                found.append(Nested(path, f"{folder}/{inside}", f"{folder}/{inside.parts[0]}"))
    return found


def environment(home: str = HOME, temporary: str = TEMPORARY) -> dict[str, str]:
    """Return the environment of programs. Nothing of it comes from the host; libraries with a pool of threads start
    one thread."""
    return {
        "PATH": f"{os.path.realpath(sys.prefix)}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": temporary,
        "USER": "guest",
        "LOGNAME": "guest",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }


def folders_above(path: str) -> set[str]:
    """Return the folders that hold a path, without the root."""
    return {str(parent) for parent in Path(path).parents} - {"/"}
