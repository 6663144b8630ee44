"""The command line with which bubblewrap makes the namespaces and the root of a sandbox, and starts its supervisor.

Ours and bubblewrap's sandboxes differ in one thing: without root a guest has its supervisor's uid, for bubblewrap maps
one. As root it makes no user namespace, and guests get a uid of their own that nobody has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncrl.envs.sandbox import view

CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_SYS_PTRACE")
"""What a supervisor that is root needs: to start guests of another uid, end them, count them, have their files."""
CODE = "/.supervisor"
"""Where the supervisor finds its code: this folder alone, of namespace packages."""
START = f"import sys; sys.path.insert(0, {CODE!r}); from asyncrl.envs.sandbox.wrapped import main; main()"


def command(
    bwrap: str, shown: Sequence[str], disk: int, uid: int | None, *, info: int, files: Mapping[str, int], place: str
) -> list[str]:
    """`info` and `files`: descriptors, the one is told the pid, the others have the content of view.FILES; `place`: the
    supervisor's Place as JSON."""
    here = Path(__file__).parent
    python = os.path.realpath(sys.executable)
    words = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--info-fd", str(info)]
    if uid is None:
        words += ["--unshare-user", "--uid", str(view.UID), "--gid", str(view.UID)]
    else:
        words += [word for name in CAPABILITIES for word in ("--cap-add", name)]
    nested = view.nested(shown)
    outer = [path for path in shown if path not in {item.source for item in nested}]
    folders = set().union(*map(view.paths_above, [*outer, *files, *view.LINKS]))
    for folder in sorted(folders):  # those that it makes unasked are for root alone
        words += ["--dir", folder]
    for path in outer:
        words += ["--ro-bind", path, path]
    for name in view.DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--proc", "/proc", "--ro-bind", str(here), f"{CODE}/asyncrl/envs/sandbox"]
    words += ["--size", str(disk), "--tmpfs", view.WRITABLE]
    for name in view.WRITABLE_FOLDERS:
        words += ["--dir", f"{view.WRITABLE}/{name}"]
    words += _nested(nested)
    for path, descriptor in files.items():
        words += ["--ro-bind-data", str(descriptor), path]
    for path, target in view.links().items():
        words += ["--symlink", target, path]
    words += ["--remount-ro", "/", "--clearenv", "--", python, "-I", "-S", "-c", START, place]
    return words


def _nested(nested: Sequence[view.Nested]) -> list[str]:
    """Mount what is shown inside the writable folders, each below a read-only folder of its own."""
    words: list[str] = []
    tops = sorted({item.top for item in nested if item.top != item.target})
    for top in tops:
        words += ["--size", str(1 << 20), "--tmpfs", top]
    for item in nested:
        for folder in sorted(path for path in view.paths_above(item.target) if item.top in view.paths_above(path)):
            words += ["--dir", folder]
        words += ["--ro-bind", item.source, item.target]
    return words + [word for top in tops for word in ("--remount-ro", top)]
