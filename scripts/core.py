"""Proof that extensions can be deleted: make core.

    python scripts/core.py [NAME ...]

Copies the committed tree, deletes an extension as its README says (every path in backticks of the section "Delete it"
that exists), and runs what is left: the structure tests, unit tests, and a run of a few steps. First all extensions but
`cpu` are deleted at once, for the unit tests of every package of the core; then each one alone, with those that need
it, for those of settings, launcher, recipes and tasks. The tests of whole runs and of the scripts use the planner's
lengths, and are not part of this. With names, only those, one after the other. The last line is JSON; the exit code is
1 if anything failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTENSIONS = Path("asyncrl/extensions")
KEPT = {"cpu"}
"""What a machine without GPUs needs for any run."""
FREE = "not campaign and not gpu and not multi_gpu and not integration and not nightly"
SOME = ["tests/config", "tests/launch", "tests/recipes", "tests/tasks", "tests/test_extension.py"]
MORE = ["algo", "agents", "checkpoints", "engine", "envs", "metrics", "network", "observability"]
MORE += ["rewards", "rollout", "trainer", "weights"]
STRUCTURE = ["tests/test_imports.py", "tests/test_names.py"]
RUN = ["experiment=tiny", "run.max_steps=3", "eval.questions=0", "run.dir=.core-run"]
RUN += ["rollout.max_running_groups=null"]  # auto, the default, needs an extension


def needs(readme: str, word: str = "Needs") -> set[str]:
    """Return the extensions that one imports: those of the line that begins with "Needs" in its README. Those of a line
    that begins with "Uses" may be missing."""
    lines = re.findall(rf"^{word} (.+)$", readme, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"`(\w+)`", line)}


def with_dependents(names: list[str]) -> list[str]:
    """Return these extensions and all that need one of them."""
    before: list[str] = []
    while before != names:
        before = names
        readmes = sorted((ROOT / EXTENSIONS).glob("*/README.md"))
        more = [file.parent.name for file in readmes if needs(file.read_text()) & {*names}]
        names = list(dict.fromkeys([*names, *more]))
    return names


def delete(tree: Path, name: str) -> list[str]:
    """Delete an extension as its README says, and return what was deleted."""
    folder = tree / EXTENSIONS / name
    section = (folder / "README.md").read_text().partition("## Delete it")[2]
    named = re.findall(r"`([^`]+)`", section)
    for word in re.findall(r"recipe `(\w+)`", section):
        named += [f"recipes/{word}", f"tests/recipes/test_{word}.py"]
    named = [word for word in named if (tree / word).exists()]
    for path in (folder, *(tree / word for word in named)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [str(EXTENSIONS / name), *named]


def check(names: list[str], *, whole: bool) -> bool:
    """Return whether the tree works without these extensions."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-core-") as folder:
        tree = Path(folder)
        archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        for name in names:
            print("deleted:", *delete(tree, name), flush=True)
        if not [*(tree / EXTENSIONS).glob("*/__init__.py")]:
            shutil.rmtree(tree / EXTENSIONS)
            shutil.rmtree(tree / "tests/extensions")
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
        commands = [
            [*pytest, "-m", "structure", *STRUCTURE],
            [*pytest, "-m", f"{FREE} and not structure", *SOME, *([f"tests/{name}" for name in MORE] if whole else [])],
            [sys.executable, "-m", "asyncrl.launch.main", *RUN],
        ]
        environment = {**os.environ, "PYTHONPATH": folder}
        return all(
            subprocess.run(command, cwd=tree, env=environment, check=False).returncode == 0 for command in commands
        )


def main() -> int:
    """Check all cases."""
    every = sorted(file.parent.name for file in (ROOT / EXTENSIONS).glob("*/__init__.py"))
    most = [name for name in every if name not in KEPT]
    cases = [with_dependents([name]) for name in sys.argv[1:]] or [most, *(with_dependents([name]) for name in most)]
    found = {}
    for names in cases:
        began = time.monotonic()
        found[" ".join(names)] = check(names, whole=names == most)
        print(f"without {' '.join(names)}: {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(found))
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
