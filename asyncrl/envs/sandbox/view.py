"""What a guest sees of the machine, the same in both backends with namespaces.

/usr, /bin, /lib*, /sbin          read-only, the host's
the Python that runs us           read-only, where the host has it: its base and its virtual environment. Below /tmp or
                                  /dev/shm, the folder there that leads to it is read-only too
/etc                              a few files of the dynamic linker, and accounts that are made up
/dev                              null, zero, full, random, urandom
/proc                             its own
/sandbox                          writable, limited: home (where commands start), tmp (/tmp), shm (/dev/shm)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WRITABLE = "/sandbox"
HOME = f"{WRITABLE}/home"
WRITABLE_FOLDERS = ("home", "tmp", "shm")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
LINKS = {
    "/tmp": f"{WRITABLE}/tmp",
    "/dev/shm": f"{WRITABLE}/shm",
    "/dev/fd": "/proc/self/fd",
    **{f"/dev/{name}": f"/proc/self/fd/{number}" for number, name in enumerate(("stdin", "stdout", "stderr"))},
}
UID, BESIDE_UID = 1000, 1001
"""Of guests, and of programs beside them (beside.py), as they see it."""
SHARED = 0o770
"""Of the writable folders: theirs is the group that both have."""
FILES = {
    "/etc/passwd": f"root:x:0:0::/:/bin/sh\nguest:x:{UID}:{UID}::{HOME}:/bin/sh\n",
    "/etc/group": f"root:x:0:\nguest:x:{UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def shown() -> list[str]:
    """Folders and files of the host that are shown at their own place, none inside another."""
    python = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    wanted = [
        path for path in (*SYSTEM, *ETC) if Path(path).exists() and not (path in SYSTEM and Path(path).is_symlink())
    ]
    return _outermost([*wanted, *sorted(python)])


def links() -> dict[str, str]:
    """Symbolic links, by place: those of the root's own that are links on the host (/bin to usr/bin), and LINKS."""
    return {path: os.readlink(path) for path in SYSTEM if Path(path).is_symlink()} | LINKS


@dataclass(frozen=True)
class Nested:
    """A path of the host that is shown inside a writable folder, because the host has it below /tmp or /dev/shm.

    The first folder on the way to `target` is a mount of its own, and read-only. Otherwise the guest, who owns the
    writable folder, could rename it and put another Python in its place. (A guest with its supervisor's uid can still
    rename the writable folder itself, and so change what later calls of its own sandbox run.)
    """

    source: str
    target: str  # below /sandbox
    top: str  # the folder of the writable folder that holds it; `target` itself, if nothing is in between


def nested(shown: Sequence[str]) -> list[Nested]:
    """Return what has to be mounted after the writable folders, and not at its own place."""
    found = []
    for path in shown:
        for link, folder in LINKS.items():
            if link in paths_above(path):
                inside = Path(path).relative_to(link)
                found.append(Nested(path, f"{folder}/{inside}", f"{folder}/{inside.parts[0]}"))
    return found


def environment(home: str = HOME, temporary: str = f"{WRITABLE}/tmp") -> dict[str, str]:
    """A guest's. Nothing of it comes from the host, and libraries with a pool of threads start one."""
    python = os.path.realpath(sys.prefix)
    return {
        "PATH": f"{python}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": home,
        "TMPDIR": temporary,
        "USER": "guest",
        "LOGNAME": "guest",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    }


def _outermost(paths: list[str]) -> list[str]:
    return [path for path in paths if not paths_above(path) & set(paths)]


def paths_above(path: str) -> set[str]:
    """The folders that hold a path, without the root."""
    return {str(parent) for parent in Path(path).parents} - {"/"}
