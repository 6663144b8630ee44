"""`asyncrl-envs`: make virtual environments for environments of verifiers, whose pins differ from those of asyncrl.

    asyncrl-envs install NAME [--from PACKAGE_OR_FOLDER]     a virtual environment NAME, in which the module NAME loads
    asyncrl-envs list                                        those that there are, with their folders

PACKAGE_OR_FOLDER is what pip installs beside verifiers: a package of an index, or a folder with a pyproject.toml. A
folder without one is put on the module path as it is. Without it, the environment must be one that verifiers ships.
They lie in $ASYNCRL_CACHE/envs (models/catalog.py). Installing again updates.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.models.catalog import cache_dir

PINNED = ("verifiers==0.4.0", "renderers==0.1.12")
LOADS = "import sys; from verifiers.v1.utils.loaders import taskset_class; taskset_class(sys.argv[1])"


def module(name: str) -> str:
    """Return the module of an environment: digits_toy of owner/digits-toy@1.0."""
    return name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()


def folder(name: str) -> Path:
    """Return the virtual environment of this name, whether it exists or not."""
    return cache_dir() / "envs" / module(name)


def python(name: str) -> Path:
    """Return its interpreter. Raises ConfigError if there is none."""
    found = folder(name) / "bin" / "python"
    if not found.exists():
        remedy = f"Set task.name to an environment. To install it: asyncrl-envs install {name} --from PACKAGE_OR_FOLDER"
        raise ConfigError("task.params.venv", str(folder(name)), remedy)
    return found


def install(name: str, source: str | None) -> int:
    """Make or update the virtual environment, and load the environment in it. Returns the exit status."""
    place = folder(name)
    interpreter = str(place / "bin" / "python")
    path = Path(source).expanduser().absolute() if source else None
    bare = path is not None and path.is_dir() and not (path / "pyproject.toml").exists()
    further = [str(path) if path and path.exists() else source] if source and not bare else []
    commands = [
        [sys.executable, "-m", "venv", str(place)],
        [interpreter, "-m", "pip", "install", "--quiet", *PINNED, *further],
    ]
    for command in commands:
        if status := subprocess.run(command, check=False).returncode:
            print(f"asyncrl-envs: status {status} of: {' '.join(command)}", file=sys.stderr)
            return 1
    if bare:
        base = {"base": str(place), "platbase": str(place)}
        site = Path(sysconfig.get_path("purelib", "venv", base))
        (site / f"{module(name)}.pth").write_text(f"{path}\n")
    done = subprocess.run([interpreter, "-c", LOADS, module(name)], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1]
        print(f"asyncrl-envs: {module(name)} does not load: {last}. Set --from to its package.", file=sys.stderr)
        return 1
    print(f"asyncrl-envs: {place} is ready: asyncrl-train task=verifiers task.name={module(name)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="asyncrl-envs", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    installing = commands.add_parser("install", help="make or update a virtual environment")
    installing.add_argument("name", help="the environment's module")
    installing.add_argument("--from", dest="source", help="its package, or a folder")
    commands.add_parser("list", help="show those that there are")
    asked = parser.parse_args(arguments)
    if asked.command == "install":
        return install(asked.name, asked.source)
    for found in sorted((cache_dir() / "envs").glob("*/bin/python")):
        print(found.parents[1].name, found.parents[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
