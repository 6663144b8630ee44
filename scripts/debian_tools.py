"""Unpacks Debian programs together with the libraries that this machine lacks, without root.

    python3 scripts/debian_tools.py slurm .venv/slurm              # for the Slurm tests
    python3 scripts/debian_tools.py bubblewrap .venv/bubblewrap    # for sandboxes; asyncrl looks for it there
    python3 scripts/debian_tools.py prometheus .venv/prometheus    # for the tests of ops/

It installs nothing: apt-get simulates the installation and downloads the packages that it would add, and dpkg unpacks
them into the folder. If the programs are already installed or unpacked, it does nothing. If they are not available, it
prints the reason and exits with status 0.

It imports only the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tool:
    """Packages that are unpacked together."""

    name: str
    packages: tuple[str, ...]
    programs: tuple[str, ...]  # programs whose presence shows that the tool is installed
    without: str  # consequence if the tool is not available


SLURM = Tool(
    name="Slurm",
    packages=("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge"),
    programs=("slurmctld", "slurmd", "sbatch", "munged"),
    without="its tests are skipped",
)
BUBBLEWRAP = Tool(
    name="bubblewrap",
    packages=("bubblewrap",),
    programs=("bwrap",),
    without="there are no sandboxes and their tests are skipped",
)
PROMETHEUS = Tool(
    name="Prometheus",
    packages=("prometheus",),
    programs=("prometheus", "promtool"),
    without="the tests that need one are skipped",
)
TOOLS = {"slurm": SLURM, "bubblewrap": BUBBLEWRAP, "prometheus": PROMETHEUS}
COMPLETE = ".complete"
"""File in the folder that lists the unpacked packages. It is written last."""
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Unavailable(Exception):
    """Raised if a tool is not available. The message states the reason and the remedy."""


def installed(tool: Tool) -> bool:
    """Return whether this machine has all of its programs. Other users than root rarely have sbin on PATH."""
    path = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"
    return all(shutil.which(program, path=path) for program in tool.programs)


def complete(folder: Path) -> bool:
    """Return whether the folder is complete. A partly unpacked folder has no mark."""
    return (folder / COMPLETE).is_file()


def library_folders(folder: Path) -> list[Path]:
    """Return the library folders of the unpacked programs: those of the architecture, and Slurm's own in them."""
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


def unpack(tool: Tool, folder: Path) -> list[str]:
    """Download and unpack everything, then move it to `folder`. Return the packages."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise Unavailable(
            f"only Debian's packages can be unpacked, and there is no apt-get here. Install {' '.join(tool.packages)}."
        )
    command = ["apt-get", "install", "--simulate", "--no-install-recommends", *tool.packages]
    packages = to_install(
        _output(command, f"apt-get does not know {tool.name}'s packages. Run `apt-get update` as root.")
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        partial.chmod(0o755)  # mkdtemp creates a folder that other users cannot enter
        _output(
            ["apt-get", "download", *packages], f"apt-get cannot download {tool.name}. Is the network there?", partial
        )
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
    """Unpack the tool, unless there is nothing to do."""
    name, place = arguments
    tool, folder = TOOLS[name], Path(place)
    if installed(tool) or complete(folder):
        return
    try:
        packages = unpack(tool, folder)
    except Unavailable as error:
        print(f"No {tool.name} here, so {tool.without}: {error}")
    else:
        print(f"{tool.name}: {len(packages)} package(s) in {folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
