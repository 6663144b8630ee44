"""Clean Debian roots in folders, and commands in them. container_check.py and fresh.py share this module.

A command gets its own mount, process and UTS namespaces, and the folder becomes its root by pivot_root. (In a chroot
the kernel creates no user namespaces, so there could be no sandboxes.) When the command ends, for whatever reason, its
mounts and processes are gone.

This module imports only the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("debootstrap", "unshare", "setpriv", "pivot_root", "ip")
ENTER = """
set -e
root=$1 hostname=$2 network=$3 cgroups=$4 directory=$5 uid=$6 gid=$7; shift 7
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
if [ "$cgroups" = yes ]; then mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"; fi
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
echo "$hostname" > /proc/sys/kernel/hostname
if [ "$network" = none ]; then ip link set lo up; fi
while [ "$1" != -- ]; do
    inside=$root$1
    if [ -d "$1" ]; then mkdir -p "$inside"; else mkdir -p "${inside%/*}"; touch "$inside"; fi
    mount --bind -o ro "$1" "$inside"
    shift
done
shift
mkdir -p "$root/.outside"
cd "$root"
pivot_root . .outside
cd /
umount -l /.outside
rmdir /.outside
cd "$directory"
# Not exec: this shell is process 1 of the namespace, and collects orphans that end.
setpriv --reuid="$uid" --regid="$gid" --clear-groups -- "$@"
"""


def debootstrap(suite: str, folder: Path, packages: str) -> None:
    """Create a minimal Debian, without files of apt, like an official image."""
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", suite, str(folder)]
    log = folder.with_suffix(".log")
    with open(log, "w") as output:
        status = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT).returncode
    if status:
        sys.exit(f"debootstrap {suite} failed with status {status}:\n{log.read_text()[-2000:]}")
    for path in (folder / "var/cache/apt/archives", folder / "var/lib/apt/lists"):
        shutil.rmtree(path)
        path.mkdir()


def copy_root(source: Path, destination: Path) -> None:
    """Copy a root with owners and modes, copy-on-write where the file system supports it."""
    subprocess.run(["cp", "-a", "--reflink=auto", str(source), str(destination)], check=True)


def enter(
    root: Path,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    user: str = "0:0",
    directory: str = "/",
    binds: Sequence[str] = (),
    network: str = "host",
    cgroups: bool = False,
    hostname: str = "clean",
    output: IO[Any] | None = None,
) -> None:
    """Run a command in the root. Raises CalledProcessError if it fails.

    environment  all environment variables of the command
    user         UID:GID, as numbers
    binds        files and folders of this machine that are mounted read-only at their own paths
    network      "none": only a loopback interface of its own
    cgroups      mount /sys/fs/cgroup, writable
    """
    spaces = ["--mount", "--pid", "--uts", "--fork", "--kill-child"] + (["--net"] if network == "none" else [])
    variables = [f"{name}={value}" for name, value in environment.items()]
    uid, gid = user.split(":")
    where = [str(root), hostname, network, "yes" if cgroups else "no", directory, uid, gid]
    argv = ["setpriv", "--pdeathsig=KILL", "unshare", *spaces, "sh", "-c", ENTER, "enter", *where, *binds, "--"]
    subprocess.run(
        [*argv, "env", "-i", *variables, *command],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
    )


def index_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tell pip and apt where to find packages."""
    return {name: value for name, value in environment.items() if re.match(r"PIP_|(?i:\w+_proxy$)", name)}


def require_root(name: str) -> None:
    """Exit with a message unless this process is root and has all programs."""
    if os.geteuid():
        sys.exit(f"{name}: run it as root (it mounts)")
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        sys.exit(f"{name}: install {' '.join(missing)} first (Debian: debootstrap, util-linux, iproute2)")


@contextmanager
def workspace(prefix: str, *, keep: bool) -> Iterator[Path]:
    """Yield a temporary folder for roots. It is removed however the block ends, including by SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if keep:
            print(f"kept: {folder}")
        else:
            remove(folder)


def remove(folder: Path, seconds: float = 10.0) -> None:
    """Remove a folder of roots. Processes that were just killed may still write to it, so try for a while."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if inside := [path for path in mounted if Path(path).is_relative_to(folder)]:
        sys.exit(f"{folder} is not removed: {', '.join(inside)} is mounted there. Unmount it, then remove the folder.")
    deadline = time.monotonic() + seconds
    while True:
        try:
            return shutil.rmtree(folder)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
