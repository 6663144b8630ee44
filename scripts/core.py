"""Proof that extensions can be deleted: make core.

    python scripts/core.py [NAME ...]

Run it before you delete anything: it copies the committed tree, deletes extensions there as their READMEs say (every
path in backticks of the section "Delete it" that exists; "set `key: value` in `file.yaml`" is carried out), and runs
what is left, in three ways. Changes that are not committed play no part. All but `cpu` at once: the structure tests,
the unit tests of every package of the core, and a run of a few steps. Then, for each extension, all but those that it
needs: its unit tests. Then several at a time, each with those that need it, such that for any two there is a case in
which one is there without the other, unless it needs it: the rules of imports, and a run. The tests of whole runs and
of the scripts use the planner's lengths, and are not part of this. With names, each of those alone is deleted: the
structure tests, the unit tests of settings, launcher, recipes, tasks and the other extensions, and a run; `all` is the
first case, all but `cpu`. The last line is JSON; the exit code is 1 if anything failed.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXTENSIONS = Path("asyncrl/extensions")
KEPT = {"cpu"}
"""What a machine without GPUs needs for any run."""
ALL = "all"
FREE_ALONE = "not campaign and not gpu and not multi_gpu and not nightly"
FREE = f"{FREE_ALONE} and not integration"
SOME = ["tests/config", "tests/launch", "tests/recipes", "tests/tasks", "tests/test_extension.py", "tests/extensions"]
MORE = ["algo", "agents", "checkpoints", "engine", "envs", "metrics", "network", "observability"]
MORE += ["rewards", "rollout", "trainer", "weights"]
STRUCTURE = ["tests/test_imports.py", "tests/test_names.py"]
RUN = ["experiment=tiny", "run.max_steps=3", "eval.questions=0", "run.dir=.core-run"]
SETTING = re.compile(r"set\s+`(\w+): (\w+)`\s+in\s+`([\w/.]+\.yaml)`")
"""A default that must change where an extension is gone."""


@cache
def committed() -> Path:
    """Return a copy of the committed tree, which is removed when this process ends; of a copy, itself."""
    if not (ROOT / ".git").exists():
        return ROOT
    tree = Path(tempfile.mkdtemp(prefix="asyncrl-core-head-"))
    atexit.register(shutil.rmtree, tree, ignore_errors=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", "HEAD"], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    return tree


def needs(readme: str, word: str = "Needs") -> set[str]:
    """Return the extensions that one imports: those of the line that begins with "Needs" in its README. Those of a line
    that begins with "Uses" may be missing."""
    lines = re.findall(rf"^{word} (.+)$", readme, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"`(\w+)`", line)}


@cache
def all_needs() -> dict[str, set[str]]:
    """Return for each extension what it needs."""
    pages = sorted((committed() / EXTENSIONS).glob("*/README.md"))
    return {page.parent.name: needs(page.read_text()) for page in pages}


def with_dependents(names: list[str]) -> list[str]:
    """Return these extensions and all that need one of them."""
    before: list[str] = []
    while before != names:
        before = names
        more = [name for name, needed in all_needs().items() if needed & {*names}]
        names = list(dict.fromkeys([*names, *more]))
    return names


def delete(tree: Path, name: str) -> list[str]:
    """Delete an extension as its README says, and return what was deleted."""
    folder = tree / EXTENSIONS / name
    section = (folder / "README.md").read_text().partition("## Delete it")[2]
    for key, value, file in SETTING.findall(section):
        text, count = re.subn(rf"^{key}: \w+$", f"{key}: {value}", (tree / file).read_text(), flags=re.MULTILINE)
        assert count == 1, f"{file} has no {key}"
        (tree / file).write_text(text)
    named = re.findall(r"`([^`]+)`", SETTING.sub("", section))
    for word in re.findall(r"recipe `(\w+)`", section):
        named += [f"recipes/{word}", f"tests/recipes/test_{word}.py"]
    named = [word for word in named if (tree / word).exists()]
    for path in (folder, *(tree / word for word in named)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return [str(EXTENSIONS / name), *named]


def check(gone: list[str], *, rules: list[str], tests: list[str], run: bool = True) -> bool:
    """Return whether the tree works without these extensions: those tests of the structure, these unit tests, a run."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-core-") as folder:
        tree = Path(folder)
        shutil.copytree(committed(), tree, symlinks=True, dirs_exist_ok=True)
        paths = [path for name in gone for path in delete(tree, name)]
        print("deleted:", *(paths if len(paths) < 30 else [len(paths), "paths"]), flush=True)
        if not [*(tree / EXTENSIONS).glob("*/__init__.py")]:
            shutil.rmtree(tree / EXTENSIONS)
            shutil.rmtree(tree / "tests/extensions")
        pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"]
        tests = [path for path in tests if (tree / path).exists()]
        commands = [
            [*pytest, "-m", "structure", *rules] if rules else [],
            [*pytest, "-m", f"{FREE} and not structure" if rules else FREE_ALONE, *tests] if tests else [],
            [sys.executable, "-m", "asyncrl.launch.main", *RUN] if run else [],
        ]
        environment = {**os.environ, "PYTHONPATH": folder}
        codes = [subprocess.run(one, cwd=tree, env=environment, check=False).returncode for one in commands if one]
        return bool(codes) and not any(codes)


def separating(names: list[str]) -> Iterator[list[str]]:
    """Yield which of these extensions to delete, case by case, until each was there without any other that it does not
    need. Of random choices, the one that shows the most."""
    draw = random.Random(0)
    left = {(one, other) for other in names for one in names if one not in with_dependents([other])}
    while left:
        tries = [with_dependents([min(left)[1]])]
        tries += [with_dependents(draw.sample(names, size)) for size in range(2, len(names) // 2) for _ in range(9)]
        shown = [{(one, other) for one, other in left if other in gone and one not in gone} for gone in tries]
        best = max(range(len(tries)), key=lambda number: len(shown[number]))
        yield tries[best]
        left -= shown[best]


def cases(named: list[str]) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """Yield the name of each case, the extensions that it deletes, and what `check` runs."""
    every = sorted(file.parent.name for file in (committed() / EXTENSIONS).glob("*/__init__.py"))
    if unknown := sorted({*named} - {*every, ALL}):
        sys.exit(f"no extension of the committed tree: {', '.join(unknown)}; known: {', '.join(every)}")
    most = [name for name in every if name not in KEPT]
    if not named or ALL in named:
        yield "the core", most, {"rules": STRUCTURE, "tests": [*SOME, *(f"tests/{name}" for name in MORE)]}
    for name in named:
        if name != ALL:
            gone = with_dependents([name])
            yield f"without {' '.join(gone)}", gone, {"rules": STRUCTURE, "tests": SOME}
    if named:
        return
    for name in most:
        gone = [other for other in most if name not in with_dependents([other])]
        yield f"{name} alone", gone, {"rules": [], "tests": [f"tests/extensions/{name}"], "run": False}
    for gone in separating(most):
        yield f"without {' '.join(gone)}", gone, {"rules": [*STRUCTURE, "-k", "exists"], "tests": []}


def main() -> int:
    """Check all cases, also after one that failed."""
    found = {}
    for name, gone, what in cases(sys.argv[1:]):
        began = time.monotonic()
        found[name] = check(gone, **what)
        print(f"{name}: {'passed' if found[name] else 'failed'}, {time.monotonic() - began:.0f} s", flush=True)
    print(json.dumps(found))
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
