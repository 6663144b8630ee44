"""The root of a sandbox in a mount namespace (mount_namespaces(7)), made by its supervisor before it serves."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from asyncrl.envs.sandbox import linux, view
from asyncrl.envs.sandbox.linux import MOUNT_ATTR_NODEV, MOUNT_ATTR_NOSUID, MOUNT_ATTR_RDONLY
from asyncrl.envs.sandbox.meter import BYTES_PER_FILE

_SKELETON = "size=1m,nr_inodes=4096,mode=755"
_NO_PROGRAMS = linux.MS_NOSUID | linux.MS_NODEV
_SIOCSIFFLAGS, _IFF_UP_AND_RUNNING = 0x8914, 0x41


def enter(shown: list[str], disk: int, uid: int | None) -> None:
    """Of the first process in new namespaces. Raises OSError.

    disk    bytes of the writable part
    uid     that the guest gets; this process becomes root of its user namespace first. None: both keep theirs
    """
    # copies are made while this process may still go where the host's permissions let it
    folders = {path for path in shown if os.path.isdir(path)}
    trees = {path: linux.copy_mount(path, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV) for path in shown}
    trees |= {f"/dev/{name}": linux.copy_mount(f"/dev/{name}", MOUNT_ATTR_RDONLY) for name in view.DEVICES}
    nested = view.nested(shown)
    inner = {item.source: trees.pop(item.source) for item in nested}
    if uid is not None:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # while it has files in /proc to open
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    root = "/tmp"  # covered from here on, for this process alone
    linux.mount("tmpfs", root, "tmpfs", _NO_PROGRAMS, _SKELETON)
    _build(root, trees, folders, view.links())
    linux.mount("proc", f"{root}/proc", "proc", _NO_PROGRAMS | linux.MS_NOEXEC)
    options = f"size={disk},nr_inodes={disk // BYTES_PER_FILE + 16},mode=755"
    linux.mount("tmpfs", root + view.WRITABLE, "tmpfs", _NO_PROGRAMS, options)
    for name in view.WRITABLE_FOLDERS:
        folder = f"{root}{view.WRITABLE}/{name}"
        os.mkdir(folder, 0o755)
        if uid is not None:
            os.chmod(folder, view.SHARED)
            os.chown(folder, uid, uid)
    _mount_nested(root, nested, inner)
    os.chdir(root)
    linux.pivot_root(".", ".")
    linux.unmount(".")
    os.chdir("/")
    _make_read_only("/")
    socket.sethostname("sandbox")
    with suppress(FileNotFoundError):  # the filter forbids them too
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    _loopback_up()


def _build(root: str, trees: dict[str, int], folders: set[str], links: dict[str, str]) -> None:
    for path in ("/proc", view.WRITABLE):
        os.mkdir(root + path, 0o755)
    for path, tree in trees.items():
        _place(root + path, folder=path in folders)
        linux.attach_mount(tree, root + path)
    for path, text in view.FILES.items():
        _place(root + path, folder=False)
        Path(root + path).write_text(text)
    for path, target in links.items():
        Path(root + path).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, root + path)


def _mount_nested(root: str, nested: list[view.Nested], trees: dict[str, int]) -> None:
    """Mount what is shown inside the writable folders, each below a read-only folder of its own."""
    tops = {root + item.top for item in nested if item.top != item.target}
    for top in tops:
        os.mkdir(top, 0o755)
        linux.mount("tmpfs", top, "tmpfs", _NO_PROGRAMS, _SKELETON)
    for item in nested:
        _place(root + item.target, folder=True)
        linux.attach_mount(trees[item.source], root + item.target)
    for top in tops:
        _make_read_only(top)


def _make_read_only(mount: str) -> None:
    linux.mount("", mount, flags=linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | _NO_PROGRAMS)


def _place(path: str, *, folder: bool) -> None:
    """Something to mount on."""
    Path(path if folder else os.path.dirname(path)).mkdir(parents=True, exist_ok=True)
    if not folder:
        Path(path).touch()


def _loopback_up() -> None:
    """The only device of a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_AND_RUNNING))
