"""Unpacks a Slurm for the tests, with every library that it needs and this machine lacks. It needs no root.

    python3 scripts/slurm_tools.py .venv/slurm

Nothing is installed: apt-get simulates the installation, downloads what that would add, and dpkg unpacks it into the
folder. Where Slurm is installed, or unpacked already, nothing happens. Where it cannot be had, the reason is printed
and the exit status is 0: the Slurm tests are then skipped.

Only the standard library is imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge")
INSTALLED = ("slurmctld", "slurmd", "sbatch", "munged")
"""The programs that stand for each of the packages."""
COMPLETE = ".complete"
"""A file in the folder, written last: the packages that were unpacked."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Unavailable(Exception):
    """Slurm cannot be had here. The message says why, and what to do."""


def installed() -> bool:
    """Return whether this machine has all of Slurm's programs. Other users than root rarely have sbin on PATH."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    return all(shutil.which(program, path=path) for program in INSTALLED)


def complete(folder: Path) -> bool:
    """Return whether the folder holds everything. One that was left half unpacked has no mark."""
    return (folder / COMPLETE).is_file()


def library_folders(folder: Path) -> list[Path]:
    """Return where the unpacked programs find their libraries: the architecture's folders, and Slurm's own in them."""
    found = [path for parent in ("usr/lib", "lib") for path in sorted((folder / parent).glob("*-linux-*"))]
    return found + [path for path in (parent / "slurm-wlm" for parent in found) if path.is_dir()]


def programs(folder: Path) -> list[Path]:
    """Return the unpacked ELF programs."""
    paths = [path for parent in ("usr/sbin", "usr/bin", "sbin", "bin") for path in sorted((folder / parent).glob("*"))]
    return [path for path in paths if path.is_file() and not path.is_symlink() and _magic(path) == b"\x7fELF"]


def unresolved(folder: Path) -> list[str]:
    """Return "PROGRAM: LIBRARY" for each library that the loader does not find."""
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, library_folders(folder)))}
    missing = []
    for program in programs(folder):
        done = subprocess.run(["ldd", program], env=environment, capture_output=True, text=True, check=False)
        missing += [f"{program.name}: {name}" for name in re.findall(r"(\S+) => not found", done.stdout)]
    return missing


def to_install(simulation: str) -> list[str]:
    """Return the packages that `apt-get install --simulate` would install, as name=version."""
    return [f"{name}={version}" for name, version in re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", simulation, re.M)]


def unpack(folder: Path) -> list[str]:
    """Download and unpack everything, and put it at `folder` when it is whole. Return the packages."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise Unavailable(
            "only Debian's packages can be unpacked, and there is no apt-get here. Install Slurm and munge."
        )
    command = ["apt-get", "install", "--simulate", "--no-install-recommends", *PACKAGES]
    packages = to_install(_output(command, "apt-get does not know Slurm's packages. Run `apt-get update` as root."))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o755)  # mkdtemp's folder is closed to other users
        _output(["apt-get", "download", *packages], "apt-get cannot download Slurm. Is the network there?", partial)
        for package in sorted(partial.glob("*.deb")):
            _output(["dpkg", "-x", str(package), str(partial)], "dpkg cannot unpack it.")
            package.unlink()
        if missing := unresolved(partial):
            raise Unavailable(f"its programs lack libraries that no package brought: {', '.join(missing)}.")
        (partial / COMPLETE).write_text("".join(f"{package}\n" for package in packages))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return packages


def _output(command: Sequence[str], meaning: str, directory: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith(("E:", "dpkg"))] or [done.stderr.strip()]
        raise Unavailable(f"{meaning}\n" + "\n".join(f"    {line}" for line in errors[:5]))
    return done.stdout


def _magic(path: Path) -> bytes:
    with path.open("rb") as program:
        return program.read(4)


def main(arguments: Sequence[str]) -> None:
    """Unpack, unless there is nothing to do."""
    (folder,) = map(Path, arguments)
    if installed() or complete(folder):
        return
    try:
        packages = unpack(folder)
    except Unavailable as error:
        print(f"No Slurm here, so its tests are skipped: {error}")
    else:
        print(f"Slurm for the tests: {len(packages)} packages in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
