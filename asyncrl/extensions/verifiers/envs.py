"""`asyncrl-envs`: make virtual environments for environments of verifiers, whose pins differ from those of asyncrl.

    asyncrl-envs install NAME [--from PACKAGE_OR_FOLDER]     a virtual environment NAME, in which the module NAME loads
    asyncrl-envs list                                        those that there are, with their folders

PACKAGE_OR_FOLDER is what pip installs beside verifiers: a package of an index, or a folder with a pyproject.toml. A
folder without one is put on the module path as it is. Without it, the environment must be one that verifiers ships.
They lie in $ASYNCRL_CACHE/envs (models/catalog.py). Installing again updates.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.models.catalog import cache_dir

INSTALL_SECONDS = 3600.0
PINNED = ("verifiers==0.4.0", "renderers==0.1.12")
HARMLESS = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_[A-Z]+|TZ|TMPDIR|LD_LIBRARY_PATH|OMP_[A-Z_]+|ASYNCRL_RUN_ID"
    "|XDG_(CACHE|CONFIG|DATA)_HOME|XDG_RUNTIME_DIR|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE|PIP_(CERT|CACHE_DIR)"
    "|UV_CACHE_DIR|HF_(HOME|HUB_CACHE|DATASETS_CACHE|HUB_OFFLINE|ENDPOINT)"
)
"""Variables that say where things are and how texts are written; the run's id is that by which the launcher finds what
is left of it."""
ADDRESS = re.compile("(HTTP|HTTPS|ALL|NO)_PROXY|PIP_INDEX_URL|UV_DEFAULT_INDEX", re.IGNORECASE)
"""Variables that are as harmless, unless their values hold a user or a password."""
LOADS = "import sys; from verifiers.v1.utils.loaders import taskset_class; taskset_class(sys.argv[1])"


def public(variables: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that a stranger's code may have: harmless ones, and those that the user has `named`. All
    others may be secrets, however they are called."""
    harmless = {name for name in variables if HARMLESS.fullmatch(name)}
    addresses = {name for name, value in variables.items() if ADDRESS.fullmatch(name) and "@" not in value}
    return {name: variables[name] for name in variables.keys() & (harmless | addresses | set(named))}


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
    named = [name for name in os.environ if name.startswith("PIP_")]  # how pip reaches an index is the user's to say
    own, pips = public(os.environ), public(os.environ, named)
    run = partial(subprocess.run, stdin=subprocess.DEVNULL, timeout=INSTALL_SECONDS, check=True)
    try:
        run([sys.executable, "-m", "venv", str(place)], env=pips)
        run([interpreter, "-m", "pip", "install", "--quiet", *PINNED, *further], env=pips)
        if bare:
            site = sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)})
            Path(site, f"{module(name)}.pth").write_text(f"{path}\n")
        run([interpreter, "-c", LOADS, module(name)], env=own, stderr=subprocess.PIPE, text=True)
    except subprocess.SubprocessError as error:
        said = str(getattr(error, "stderr", None) or "").strip()
        problem = (
            f"{module(name)} does not load: {said.splitlines()[-1]}. Set --from to its package." if said else error
        )
        print(f"asyncrl-envs: {problem}", file=sys.stderr)
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
