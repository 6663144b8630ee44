"""Runs the README's commands on a fresh machine: a clean Debian with nothing but the README's packages, and a clone.

    sudo python3 scripts/fresh.py [--variant root|user] [--command run|test] [--bind PATH ...] [--base DIR] [--keep]

It creates two machines, one after the other, and runs `make run` and `make test` on each:

root    everything runs as root, and the clone is below /tmp
user    root installs the README's system packages; another user does the rest, with a space in the path of the clone

The clone contains the commit that is checked out here, without uncommitted changes. The root sees the following of this
machine: the configuration for finding packages (pip's and apt's, PIP_*, proxies, certificates), the network, /dev and
/sys/fs/cgroup, and the paths of --bind, for folders that pip is configured with. The rest of the machine is not visible
(clean_root.py).

The last line of each machine is JSON: seconds of the environment (setup_s, part of the first command), of the rest of
`make run`, and of `make test`. If a command fails, the exit status is 1. The logs of failed or interrupted commands are
kept.

It needs root, debootstrap, iproute2, git and 6 GB for temporary files. It imports only the standard library.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import clean_root  # noqa: E402

SUITE = "bookworm"
HOSTNAME = "fresh"
COMMANDS = ("run", "test")
BUNDLE = "/srv/asyncrl.bundle"
PIP_FILES = ("/etc/pip.conf", "/etc/xdg/pip")
PIP_USER_FILES = (".config/pip", ".pip")
PIP_PLACES = ("index-url", "extra-index-url", "find-links", "constraint")
"""pip's settings that may name a file or folder."""
APT_SETTINGS = r"Acquire::(?:http|https|Check-|Retries|ForceIPv|AllowInsecure)"
LOG_LINES = 40
"""Number of log lines that are printed for a failed command."""


@dataclass(frozen=True)
class Variant:
    """Variant of the check: who runs the commands, and in which folder."""

    name: str
    user: str
    home: str
    checkout: str
    uid: int = 0


VARIANTS = {
    "root": Variant("root", "root", "/root", "/tmp/asyncrl"),
    "user": Variant("user", "tester", "/home/tester", "/home/tester/a folder/asyncrl", uid=1000),
}


class Failed(Exception):
    """Raised if a step fails. The message names the step, its status and its log."""


@dataclass
class Machine:
    """Clean root, and the log of the commands in it."""

    root: Path
    variant: Variant
    log: Path
    binds: Sequence[str]
    passed: Mapping[str, str] = field(default_factory=dict)

    def run(self, what: str, command: Sequence[str], *, directory: str = "/", as_root: bool = False) -> float:
        """Run a command, and return how many seconds it took. Raises Failed."""
        variant = VARIANTS["root"] if as_root else self.variant
        began = time.monotonic()
        try:
            with self.log.open("ab") as log:
                log.write(f"\n==== {self.variant.name}: {what}\n$ {shlex.join(command)}\n".encode())
                log.flush()
                clean_root.enter(
                    self.root,
                    command,
                    environment={**environment(variant), **self.passed},
                    user=f"{variant.uid}:{variant.uid}",
                    directory=directory,
                    binds=self.binds,
                    cgroups=True,
                    hostname=HOSTNAME,
                    output=log,
                )
        except subprocess.CalledProcessError as error:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
            raise Failed(f"{what} failed with status {error.returncode}; log: {self.log}\n{last}") from None
        seconds = time.monotonic() - began
        print(f"{self.variant.name}: {what}: {seconds:.0f} s", flush=True)
        return seconds


def environment(variant: Variant) -> dict[str, str]:
    """Return a login shell's variables."""
    path = clean_root.PATH if variant.uid == 0 else "/usr/local/bin:/usr/bin:/bin"
    names = {"HOME": variant.home, "USER": variant.user, "LOGNAME": variant.user, "SHELL": "/bin/bash"}
    return {"PATH": path, **names, "LANG": "C.UTF-8", "TERM": "dumb"}


def prerequisites(readme: str) -> list[str]:
    """Return the words of the README's command that installs system packages."""
    found = re.findall(r"^(?:sudo )?(apt-get install .*)$", readme, re.M)
    if len(found) != 1:
        raise SystemExit(f"fresh: README.md should have one line `apt-get install ...`, and has {len(found)}")
    return shlex.split(found[0], comments=True)


def pip_files() -> list[Path]:
    """Return the machine's configuration of pip, files and folders, outside of homes."""
    return [path for path in map(Path, PIP_FILES) if path.exists()]


def pip_user_files() -> list[Path]:
    """Return the configuration of pip of whoever runs this, relative to the home."""
    return [Path(name) for name in PIP_USER_FILES if (Path.home() / name).exists()]


def local_places(values: Iterable[str]) -> set[str]:
    """Return the local paths among pip's values: indexes, folders of wheels, lists of constraints."""
    words = (word for value in values for word in value.split())
    paths = (unquote(urlsplit(word).path) if word.startswith("file:") else word for word in words)
    return {path for path in paths if path.startswith("/")}


def pip_values(files: Iterable[Path], variables: Mapping[str, str]) -> Iterator[str]:
    """Yield pip's settings of package locations, from files and variables."""
    for path in files:
        for file in [path] if path.is_file() else sorted(path.glob("pip.conf")):
            parser = configparser.RawConfigParser()
            parser.read(file)
            for section in parser.sections():
                yield from (value for name, value in parser.items(section) if name in PIP_PLACES)
    for name in PIP_PLACES:
        yield variables.get(f"PIP_{name.upper().replace('-', '_')}", "")


def unseen(places: Iterable[str], visible: Iterable[str]) -> list[str]:
    """Return the places that are below none of the visible paths."""
    seen = list(visible)
    return sorted(place for place in places if not any(Path(place).is_relative_to(path) for path in seen))


def copy_index_settings(root: Path, home: str) -> None:
    """Copy the configuration for finding packages: pip's, apt's, and the machine's own certificates."""
    for path in pip_files():
        _copy(path, root / path.relative_to("/"))
    for path in pip_user_files():
        _copy(Path.home() / path, root / home.lstrip("/") / path)
    sources = [path for path in _apt_sources() if SUITE in path.read_text()]
    if sources:
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
    for path in [*sources, *_keyrings(sources), *Path("/etc/apt").glob("auth.conf*")]:
        _copy(path, root / path.relative_to("/"))
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    kept = [line for line in dump.splitlines() if re.match(APT_SETTINGS, line)]
    (root / "etc/apt/apt.conf.d/90index").write_text("".join(f"{line}\n" for line in kept))
    for path in Path("/usr/local/share/ca-certificates").glob("*.crt"):
        _copy(path, root / path.relative_to("/"))


def _apt_sources() -> list[Path]:
    folder = Path("/etc/apt/sources.list.d")
    found = [Path("/etc/apt/sources.list"), *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]
    return [path for path in found if path.is_file()]


def _keyrings(sources: Iterable[Path]) -> list[Path]:
    text = "\n".join(path.read_text() for path in sources)
    named = re.findall(r"signed-by\s*[:=]\s*(/[^\s\]]+)", text, re.I)
    return [path for path in map(Path, dict.fromkeys(named)) if path.is_file()]


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, destination, dirs_exist_ok=True)
    else:
        shutil.copy(source, destination)


def prepare(machine: Machine, base: Path, bundle: Path) -> None:
    """Create the machine: its root, packages, user and clone."""
    root, variant = machine.root, machine.variant
    clean_root.copy_root(base, root)
    (root / "etc/hostname").write_text(f"{HOSTNAME}\n")
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {HOSTNAME}\n")
    copy_index_settings(root, variant.home)
    shutil.copy(bundle, root / BUNDLE.lstrip("/"))
    machine.run("certificates", ["update-ca-certificates"], as_root=True)
    machine.run("apt-get update", ["apt-get", "update"], as_root=True)
    install = ["env", "DEBIAN_FRONTEND=noninteractive", *prerequisites((ROOT / "README.md").read_text()), "--yes"]
    machine.run("system packages of the README", install, as_root=True)
    if variant.uid:
        user = ["useradd", "--uid", str(variant.uid), "--user-group", "--shell", "/bin/bash", variant.user]
        machine.run("user", user, as_root=True)
        (root / variant.home.lstrip("/")).mkdir(parents=True, exist_ok=True)
        machine.run("home", ["chown", "-R", f"{variant.user}:", variant.home], as_root=True)
    clone = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", BUNDLE, variant.checkout]
    machine.run("clone", clone, directory=variant.home)


def check(machine: Machine, commands: Sequence[str], arguments: str, instead: str | None) -> dict[str, float]:
    """Run the commands in the clone. Return the seconds that setup, run and test took. Raises Failed."""
    checkout = machine.variant.checkout
    stamp = machine.root / checkout.lstrip("/") / ".venv" / ".stamp"
    if instead is not None:
        machine.run(instead, ["sh", "-c", instead], directory=checkout)
        return {}
    times: dict[str, float] = {}
    for name in commands:
        words = ["make", name, *([f"ARGS={arguments}"] if name == "run" and arguments else [])]
        began = time.time()
        seconds = machine.run(shlex.join(words), words, directory=checkout)
        if "setup_s" not in times:
            times["setup_s"] = stamp.stat().st_mtime - began
            seconds -= times["setup_s"]
        times[f"{name}_s"] = seconds
    return times


def make_bundle(destination: Path) -> str:
    """Write the commit that is checked out, with its history, to a file that can be cloned. Return its id."""
    git = ["git", "-C", str(ROOT), "-c", f"safe.directory={ROOT}"]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    subprocess.run([*git, "bundle", "create", "--quiet", str(destination), "HEAD"], check=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    if changed:
        print("note: there are uncommitted changes; they are not in the clone", flush=True)
    return commit


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="one of the two machines; default: both")
    parser.add_argument("--command", action="append", choices=COMMANDS, help="one of the two commands; default: both")
    parser.add_argument("--run-args", default="", metavar="TEXT", help="ARGS of `make run`")
    parser.add_argument("--instead", metavar="SHELL", help="run this in the clone, in place of the commands")
    parser.add_argument(
        "--bind", action="append", default=[], metavar="PATH", help="a file or folder that the roots see, read-only"
    )
    parser.add_argument("--base", type=Path, help="a clean root, instead of debootstrap's; it is copied, not changed")
    parser.add_argument("--keep", action="store_true", help="keep the roots and the logs")
    return parser.parse_args(arguments)


def main() -> None:
    """Create the machines, run the commands and print the times. Always clean up."""
    options = parsed()
    clean_root.require_root("fresh")
    passed = clean_root.index_variables(os.environ)
    settings = [*pip_files(), *(Path.home() / path for path in pip_user_files())]
    places = local_places(pip_values(settings, passed))
    if hidden := unseen(places, [*options.bind, *map(str, settings)]):
        sys.exit(f"fresh: pip is configured with {' '.join(hidden)}: give --bind with each, or a folder above it")
    binds = ["/etc/resolv.conf", *options.bind]
    logs = Path(tempfile.mkdtemp(prefix="asyncrl-fresh-logs-"))
    print(f"logs: {logs}", flush=True)
    results = []
    with clean_root.workspace("asyncrl-fresh-", keep=options.keep) as work:
        print(f"commit {make_bundle(work / 'bundle')}", flush=True)
        base = options.base or work / "base"
        if options.base is None:
            began = time.monotonic()
            clean_root.debootstrap(SUITE, base, "ca-certificates")
            print(f"debootstrap {SUITE}: {time.monotonic() - began:.0f} s", flush=True)
        for name in options.variant or VARIANTS:
            machine = Machine(work / name, VARIANTS[name], logs / f"{name}.log", binds, passed)
            times, ok = {}, True
            try:
                prepare(machine, base, work / "bundle")
                times = check(machine, options.command or COMMANDS, options.run_args, options.instead)
            except Failed as error:
                ok = False
                print(f"{name}: {error}", flush=True)
            seconds = {key: round(times[key], 1) if key in times else None for key in ("setup_s", "run_s", "test_s")}
            results.append({"variant": name, **seconds, "ok": ok})
            if not options.keep:
                clean_root.remove(machine.root)
    good = all(result["ok"] for result in results)
    if good and not options.keep:
        shutil.rmtree(logs)
    for result in results:
        print(json.dumps(result))
    sys.exit(not good)


if __name__ == "__main__":
    main()
