"""Bubblewrap: finds its program, and builds the command line that makes a sandbox and starts the worker in it.

A program in the sandbox sees these parts of the machine:

    /usr, /bin, /lib*, /sbin     read-only, the host's
    the Python that runs us      read-only, at the host's path: its base and its virtual environment. If that is below
                                 /tmp or /dev/shm, the folder that leads to it is read-only too
    /etc                         a few files of the dynamic linker, and invented accounts
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

from asyncrl.extensions.sandbox.program import WRITABLE
from asyncrl.extensions.sandbox.worker import WRITABLE_FOLDERS

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
"""Uid that programs see, unless they have a uid of their own on the host."""
FILES = {
    "/etc/passwd": f"root:x:0:0::/:/bin/sh\nguest:x:{UID}:{UID}::{HOME}:/bin/sh\n",
    "/etc/group": f"root:x:0:\nguest:x:{UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
ISOLATED = (
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
    "--die-with-parent",
    "--as-pid-1",
    "--new-session",
    "--hostname",
    "sandbox",
    "--clearenv",
)
ONE_USER = ("--unshare-user", "--uid", str(UID), "--gid", str(UID))
"""Options that give programs the uid of the worker, which on the host is the uid of the owner."""
CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "SYS_PTRACE")
OWN_USERS = tuple(word for name in CAPABILITIES for word in ("--cap-add", f"CAP_{name}"))
"""Options for root, under which programs have an unused uid. The worker needs these capabilities to start, kill and
count the programs, and to access their files."""
CODE = "/.worker"
"""Folder in a sandbox that holds the worker's code. It contains only the package asyncrl.extensions.sandbox."""
UNPACKED = "bubblewrap/usr/bin/bwrap"
"""Path of the program that `make bubblewrap` installs, relative to the virtual environment."""


def find() -> tuple[str, dict[str, str]] | None:
    """Return the path of bwrap and the environment that it needs; None if bwrap is not installed.

    The program in the virtual environment takes precedence over the one on PATH.
    """
    unpacked = Path(sys.prefix, UNPACKED)
    if os.access(unpacked, os.X_OK):
        root = unpacked.parents[2]
        libraries = [str(path) for top in ("usr/lib", "lib") for path in sorted((root / top).glob("*-linux-*"))]
        return str(unpacked), {"LD_LIBRARY_PATH": ":".join(libraries)} if libraries else {}
    found = shutil.which("bwrap")
    return (found, {}) if found else None


def python(code: str) -> list[str]:
    """Return the command that starts a worker with the code in this folder.

    The caller appends the worker's settings.
    """
    start = f"import sys; sys.path.insert(0, {code!r}); from asyncrl.extensions.sandbox.worker import main; main()"
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", start]


def command(
    bwrap: str, users: Sequence[str], shown: Sequence[str], disk: int, *, files: Mapping[str, int], seccomp: int | None
) -> list[str]:
    """Return the command that starts a worker in a sandbox. The caller appends the worker's settings.

    users    ONE_USER, perhaps with --disable-userns, or OWN_USERS
    shown    paths of the host to mount (see `shown`)
    disk     size of the writable part, in bytes
    files    descriptors that hold the contents of FILES, by path
    seccomp  descriptor of the system-call filter; None: no filter
    """
    words = [bwrap, *ISOLATED, *users]
    inside = nested(shown)
    outer = [path for path in shown if path not in {item.source for item in inside}]
    for folder in sorted(set().union(*map(folders_above, [*outer, *files, *LINKS]))):
        words += ["--dir", folder]  # bubblewrap would create missing parents for root only
    for path in outer:
        words += ["--ro-bind", path, path]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--proc", "/proc", "--ro-bind", str(Path(__file__).parent), f"{CODE}/asyncrl/extensions/sandbox"]
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
    """Return the files and folders of the host that are mounted at their own paths. None lies inside another."""
    wanted = [path for path in (*SYSTEM, *ETC) if Path(path).exists() and path not in links()]
    wanted += sorted({os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)})
    return [path for path in wanted if not folders_above(path) & set(wanted)]


def links() -> dict[str, str]:
    """Return targets of symbolic links by path: LINKS, and system folders that are links on the host (/bin to
    usr/bin)."""
    return {path: os.readlink(path) for path in SYSTEM if Path(path).is_symlink()} | LINKS


@dataclass(frozen=True)
class Nested:
    """A path of the host that is mounted inside a writable folder, because on the host it is below /tmp or /dev/shm.

    The first folder on the way to `target` is a read-only mount of its own. Otherwise a program, which owns the
    writable folder, could rename it and put another Python in its place. (A program with its worker's uid can still
    rename the writable folder itself, and so change what later calls of its own sandbox run.)
    """

    source: str
    target: str  # below /sandbox
    top: str  # first folder on the way, below the writable folder; `target` if nothing is in between


def nested(shown: Sequence[str]) -> list[Nested]:
    """Return the paths that must be mounted inside the writable folders instead of at their own paths."""
    found = []
    for path in shown:
        for link, folder in LINKS.items():
            if link in folders_above(path):
                inside = Path(path).relative_to(link)
                found.append(Nested(path, f"{folder}/{inside}", f"{folder}/{inside.parts[0]}"))
    return found


def environment(home: str = HOME, temporary: str = TEMPORARY) -> dict[str, str]:
    """Return the environment of programs.

    No variable is copied from the host. Libraries that have a thread pool are limited to one thread.
    """
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
    """Return all folders above a path, except the root."""
    return {str(parent) for parent in Path(path).parents} - {"/"}
