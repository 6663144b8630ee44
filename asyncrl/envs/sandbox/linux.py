"""System calls that Python 3.11 does not have. Each raises OSError.

Numbers stand here only where they are the same on every architecture: those from Linux 5.1 on.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NEW_NAMESPACES = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH = -100, 0x8000, 0x1000
_OPEN_TREE_CLONE, _MOVE_FROM_FD = 1, 4
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def unshare(flags: int) -> None:
    """Leave the caller's namespaces for new ones (unshare(2))."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    done = _libc.mount(
        source.encode(), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), options.encode()
    )
    _checked(done, f"mount {target}")


def unmount(target: str) -> None:
    """umount2(2), at once for whoever looks and later for who still uses it."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    _checked(_libc.pivot_root(os.fsencode(new), os.fsencode(old)), "pivot_root")


def copy_mount(path: str, attributes: int) -> int:
    """A detached copy of the mounts below a path, with MOUNT_ATTR_*; a file descriptor (open_tree(2), Linux 5.12)."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    tree = _libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), flags)
    _checked(tree, f"open_tree {path}")
    change = _MountAttributes(set=attributes)
    done = _libc.syscall(
        _MOUNT_SETATTR,
        tree,
        b"",
        _AT_EMPTY_PATH | _AT_RECURSIVE,
        ctypes.byref(change),
        ctypes.c_size_t(ctypes.sizeof(change)),
    )
    _checked(done, f"mount_setattr {path}")
    return int(tree)


def attach_mount(tree: int, target: str) -> None:
    """Put what copy_mount returned where it is to be seen (move_mount(2))."""
    _checked(
        _libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_FROM_FD), f"move_mount {target}"
    )
    os.close(tree)


def prctl(option: int, value: int, pointer: ctypes._Pointer | None = None) -> None:
    """prctl(2)."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value or 0 if pointer is not None else 0
    _checked(_libc.prctl(option, value, address, 0, 0), f"prctl {option}")


def _checked(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
