"""Imports go one way, the launcher stays light, and the core does not grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import asyncrl
from scripts.core import KEPT, MORE, needs, with_dependents

PACKAGE = Path(asyncrl.__file__).parent
EXTENSIONS = PACKAGE / "extensions"
FOLDERS = sorted(folder.parent.name for folder in EXTENSIONS.glob("*/__init__.py"))
EXTENSION_FILES = sorted(EXTENSIONS.rglob("*.py"))
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file not in EXTENSION_FILES]
"""Those of the core."""
RECIPES = PACKAGE.parent / "recipes"
RECIPE_FILES = sorted(RECIPES.rglob("*.py"))
ALL_FILES = FILES + EXTENSION_FILES + RECIPE_FILES
RECIPES_USE = {"agents", "envs", "tasks", "rewards", "algo", "settings", "extension", "extensions"}
"""Packages with what users build on; the modules that are open to all come in addition."""
OPEN = {  # to all
    *("schema", "errors", "retries", "parallel", "metrics", "jsonl", "user_code", "routing", "leases"),
    *("import_hooks", "network", "progress", "threads", "images", "removed", "extension", "lookup", "platforms"),
}

# What each package may import of the others. `__main__` files wire across and stand outside.
ALLOWED = {
    "schema": set(),
    "retries": set(),
    "threads": set(),
    "images": set(),
    "extension": {"settings"},
    "lookup": {"settings"},
    "errors": set(),
    "parallel": set(),
    "jsonl": {"errors"},
    "import_hooks": set(),
    "network": {"errors"},
    "leases": set(),
    "progress": {"leases"},
    "user_code": {"errors", "removed"},
    "routing": set(),
    "settings": set(),
    "config": {"errors", "settings", "algo"},
    "removed": set(),
    "metrics": {"config"},
    "platforms": set(),
    "models": set(),
    "launch": {
        *("config", "engine", "models", "tasks", "checkpoints", "observability"),
        *("weights", "rollout", "settings"),
    },
    "engine": {"config", "observability"},
    "agents": {"envs"},
    "envs": {"observability"},
    "rewards": set(),
    "tasks": {"config", "envs", "rewards"},
    "observability": set(),
    "checkpoints": set(),
    "rollout": {
        *("config", "engine", "agents", "envs", "rewards", "checkpoints", "tasks", "models"),
        "observability",
    },
    "algo": {"config", "settings"},
    "weights": {"config", "engine", "models"},
    "trainer": {"config", "algo", "engine", "weights", "checkpoints", "models", "observability"},
}
# Within a package, where only some modules are meant.
ONLY = {
    ("launch", "engine"): {"engine.server", "engine.router", "engine.registry"},
    ("launch", "checkpoints"): {"checkpoints.manifest", "checkpoints.store"},
    ("rollout", "models"): {"models.architectures", "models.families"},
    ("rollout", "checkpoints"): {"checkpoints.manifest", "checkpoints.store"},
    ("launch", "weights"): {"weights.choice"},
    ("launch", "rollout"): {"rollout.agent"},
    ("launch", "models"): {"models.catalog", "models.architectures", "models.families", "models"},
    ("rollout", "engine"): {
        *("engine.served", "engine.client", "engine.inflight", "engine.router", "engine.loads"),
        *("engine.session", "engine.stop_strings", "engine.stream"),
    },
    ("weights", "engine"): {"engine.served", "engine.calls", "engine.fleet", "engine.update", "engine.server"},
    ("engine", "observability"): {"observability.intervals"},
    ("launch", "observability"): {"observability.timeline"},
    ("envs", "observability"): {"observability.intervals"},
    ("trainer", "observability"): {"observability.timeline"},
    ("trainer", "models"): {"models.architectures", "models.families", "models.parts"},
    ("weights", "models"): {"models.families", "models.family", "models.parts", "models"},
    ("trainer", "engine"): {"engine.served", "engine.fleet", "engine.update"},
}
HEAVY = {"algo": {"megatron", "sglang", "httpx", "transformers"}, "config": {"torch", "hydra", "omegaconf"}}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from running(node)


def imported(tree: ast.AST, runtime_only: bool = True) -> set[str]:
    """Full names of the modules that a file imports; of `from a import b` both a and a.b."""
    found: set[str] = set()
    for node in running(tree) if runtime_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def own_imports() -> list[tuple[str, str, str]]:
    """(importing package, imported package, imported module) for every import inside asyncrl."""
    modules = {".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in FILES}
    modules |= {name.removesuffix(".__init__") for name in modules}
    found = []
    for file in FILES:
        here = file.relative_to(PACKAGE).with_suffix("").parts
        if here[-1] == "__main__":
            continue
        for name in imported(parsed(file)):
            parts = name.split(".")[1:]
            if not name.startswith("asyncrl.") or not parts or parts[0] not in {m.split(".")[0] for m in modules}:
                continue
            module = ".".join(parts) if ".".join(parts) in modules else ".".join(parts[:-1]) or parts[0]
            if parts[0] != here[0]:
                found.append((here[0], parts[0], module))
    return found


def module_file(name: str) -> Path | None:
    """The file of a module of this repository, or the folder of a package without `__init__.py`."""
    path = PACKAGE.parent.joinpath(*name.replace("asyncrl_recipes", "recipes").split("."))
    found = [place for place in (path.with_suffix(".py"), path / "__init__.py", path) if place.exists()]
    return found[0] if found else None


@cache
def names_in(file: Path) -> set[str]:
    """Every name that a file binds."""
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("file", ALL_FILES, ids=lambda file: str(file.relative_to(PACKAGE.parent)))
def test_functions_import_only_what_exists(file: Path) -> None:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.startswith(("asyncrl.", "asyncrl_recipes."))]
            assert [name for name in own if not module_file(name)] == []
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("asyncrl", "asyncrl_recipes"):
            parts = str(node.module).split(".")
            if parts[1:2] == ["extensions"] and len(parts) > 2 and parts[2] not in FOLDERS:
                continue  # one that was deleted, of which "Uses" in the README says that it may be missing
            place = module_file(str(node.module))
            assert place, f"{node.module} does not exist"
            there = names_in(place) if place.is_file() else set()
            lost = [alias.name for alias in node.names if alias.name not in there]
            assert [name for name in lost if not module_file(f"{node.module}.{name}")] == []


def test_packages_import_only_what_the_design_allows() -> None:
    wrong = [
        (here, module)
        for here, package, module in own_imports()
        if here != "__init__" and package not in OPEN | ALLOWED[here]
    ]
    assert wrong == []


def test_where_only_some_modules_are_meant_no_other_is_imported() -> None:
    wrong = [(here, m) for here, package, m in own_imports() if m not in ONLY.get((here, package), {m})]
    assert wrong == []


def test_rules_name_every_package_and_the_graph_was_really_read() -> None:
    packages = {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in FILES} - {"__init__"}
    assert packages <= ALLOWED.keys()
    edges = {(here, package) for here, package, _ in own_imports()}
    assert {("launch", "config"), ("rollout", "engine"), ("trainer", "algo"), ("trainer", "weights")} <= edges


@pytest.mark.parametrize(("one", "other"), [("rollout", "trainer"), ("engine", "rollout"), ("engine", "trainer")])
def test_these_never_import_each_other(one: str, other: str) -> None:
    edges = {(here, package) for here, package, _ in own_imports()}
    assert (one, other) not in edges
    if one == "rollout":
        assert (other, one) not in edges


def test_the_core_imports_neither_recipes_nor_extensions() -> None:
    for file in FILES:
        names = imported(parsed(file), runtime_only=False)
        assert not {name.split(".")[0] for name in names} & {"asyncrl_recipes", "recipes"}, file
        assert not any(name.startswith("asyncrl.extensions") for name in names), file
        named = [name for name in FOLDERS if re.search(rf"extensions[./]{name}\b", file.read_text())]
        assert file.stem == "removed" or not named, f"{file} names an extension: {named}"


def unguarded(file: Path) -> set[str]:
    """Return the extensions that a file of tests imports and does not skip a test or itself for."""
    tree, text = parsed(file), file.read_text()
    outside = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], [])
    skips = r'pytest\.importorskip\("asyncrl\.extensions\.(\w+)'
    found = set[str]()
    for part, skip in ((outside, rf"^(?:\w+ = )?{skips}"), (tree, skips)):
        names = [name.split(".") for name in imported(part)]
        used = {parts[2] for parts in names if parts[:2] == ["asyncrl", "extensions"]}
        found |= used - {*re.findall(skip, text, re.MULTILINE)}
    return found


def test_tests_import_only_what_is_there_with_what_they_test() -> None:
    tests = Path(__file__).parent
    folders = dict.fromkeys((*MORE, "config", "launch", "tasks"), KEPT)
    for name in FOLDERS:
        folders[f"extensions/{name}"] = {name, *KEPT, *(other for other in FOLDERS if name in with_dependents([other]))}
    files = [(file, there) for folder, there in folders.items() for file in (tests / folder).rglob("*.py")]
    assert len(files) > 100
    wrong = {str(file.relative_to(tests)): more for file, there in files if (more := unguarded(file) - there)}
    assert wrong == {}


@pytest.mark.parametrize("file", EXTENSION_FILES[1:], ids=lambda file: str(file.relative_to(EXTENSIONS)))
def test_extensions_import_the_core_and_what_their_readme_names(file: Path) -> None:
    own = file.relative_to(EXTENSIONS).parts[0]
    names = [name.split(".") for name in imported(parsed(file), runtime_only=False)]
    used = {parts[2] for parts in names if parts[:2] == ["asyncrl", "extensions"]} - {own}
    readme = (EXTENSIONS / own / "README.md").read_text()
    assert used <= needs(readme) | needs(readme, "Uses")
    assert "asyncrl_recipes" not in {parts[0] for parts in names}


@pytest.mark.parametrize("file", RECIPE_FILES, ids=lambda file: str(file.relative_to(RECIPES)))
def test_recipes_use_what_users_build_on_and_not_each_other(file: Path) -> None:
    names = [name.split(".") for name in imported(parsed(file), runtime_only=False) if "." in name]
    assert {parts[1] for parts in names if parts[0] == "asyncrl"} <= OPEN | RECIPES_USE
    assert {parts[1] for parts in names if parts[0] == "asyncrl_recipes"} <= {file.relative_to(RECIPES).parts[0]}


@pytest.mark.parametrize("package", HEAVY)
def test_light_packages_import_nothing_heavy(package: str) -> None:
    files = [file for file in FILES if file.relative_to(PACKAGE).with_suffix("").parts[0] == package]
    assert files
    for file in files:
        assert not {name.split(".")[0] for name in imported(parsed(file))} & HEAVY[package], file


@pytest.mark.parametrize(
    "module", ["asyncrl.launch.run", "asyncrl.launch.compose", "asyncrl.config", "asyncrl.metrics.console"]
)
def test_launcher_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{'torch', 'transformers', 'megatron', 'sglang'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# Third-party packages that cost 20 ms to seconds each to import.
SLOW = {
    *("httpx", "hydra", "megatron", "msgspec", "numpy", "omegaconf", "psutil", "pyarrow", "pydantic", "rich", "sglang"),
    *("torch", "transformers", "yaml"),
}


def modules_after(tmp_path: Path, module: str, *arguments: str) -> set[str]:
    """Top-level modules that a command has imported by the time it ends."""
    found = tmp_path / "modules"
    code = (
        "import atexit, pathlib, runpy, sys; "
        f"atexit.register(lambda: pathlib.Path({str(found)!r}).write_text(' '.join(sys.modules))); "
        f"sys.argv = ['command', *{list(arguments)!r}]; runpy.run_module({module!r}, run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=tmp_path)
    return {name.split(".")[0] for name in found.read_text().split()}


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("asyncrl.launch.main", ["--help"], set()),
        ("asyncrl.launch.main", ["experiment=tiny", "-h"], set()),
        *([("asyncrl.extensions.convert.cli", ["--help"], set())] if "convert" in FOLDERS else []),
        *([("asyncrl.extensions.install", ["--help"], set())] if "install" in FOLDERS else []),
        *([("asyncrl.extensions.view.watch.cli", ["--help"], set())] if "view" in FOLDERS else []),
        ("asyncrl.launch.main", ["-sc", "install=bash"], {"hydra", "omegaconf", "yaml"}),
        ("asyncrl.launch.main", ["--cfg", "job"], {"hydra", "omegaconf", "yaml"}),
        ("asyncrl.launch.main", ["rollout.max_stalenes=1"], {"hydra", "omegaconf", "yaml"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_command_imports_nothing_slow_before_it_needs_it(
    module: str, arguments: list[str], expected: set[str], tmp_path: Path
) -> None:
    assert modules_after(tmp_path, module, *arguments) & SLOW == expected


# --- sizes --------------------------------------------------------------------------------------------------


MOST_LINES = 29_450
"""Most lines of the core, whatever is in them. Lower it after a deletion. There is no limit for a
file or a function: such limits were met by folding lines."""


def test_the_core_does_not_grow() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FILES) <= MOST_LINES


def test_readme_and_architecture_say_the_size_of_the_core() -> None:
    for page in ("README.md", "docs/architecture.md"):
        assert f"fewer than {MOST_LINES:,} lines" in (PACKAGE.parent / page).read_text()


MOST_PARAMETERS = 10


def test_constructors_take_few_parameters() -> None:
    """What is fixed for a run is one object (ClientSettings, JudgeSettings); collaborators are built where they are
    known. Also in extensions and recipes."""
    constructors = {
        node.name: method.args
        for file in ALL_FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    }
    taken = {name: len([*of.posonlyargs, *of.args, *of.kwonlyargs]) - 1 for name, of in constructors.items()}
    assert {name: count for name, count in taken.items() if count > MOST_PARAMETERS} == {}


def test_every_module_and_public_function_has_a_docstring() -> None:
    silent = []
    for file in ALL_FILES:
        tree = parsed(file)
        if tree.body and ast.get_docstring(tree) is None:
            silent.append(str(file))
        silent += [
            f"{file}:{node.name}"
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and ast.get_docstring(node) is None
        ]
    assert silent == []


def test_blind_excepts_that_go_on_are_at_most_five() -> None:
    found = [
        f"{file.relative_to(PACKAGE.parent)}:{node.lineno}"
        for file in ALL_FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and not any(isinstance(one, ast.Raise) for one in ast.walk(node))
    ]
    assert len(found) <= 5, found


@pytest.mark.parametrize("word", ["pkill", "killall", "os.system", "shell=True", "pickle.load"])
def test_forbidden_call_is_nowhere(word: str) -> None:
    assert [str(file) for file in ALL_FILES if word in file.read_text()] == []


def test_composition_stays_in_the_launcher() -> None:
    users = {
        str(file.relative_to(PACKAGE))
        for file in FILES
        if {name.split(".")[0] for name in imported(parsed(file), runtime_only=False)} & {"hydra", "omegaconf"}
    }
    assert users == {"launch/compose.py"}


@pytest.mark.parametrize("path", FILES + EXTENSION_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_raised_inside_except_star(path: Path) -> None:
    """Before Python 3.11.4 (Debian 12 has 3.11.2) an exception raised inside `except*` arrives wrapped in a group."""
    assert not [node.lineno for node in ast.walk(parsed(path)) if isinstance(node, ast.TryStar)]


OF_A_TEST_FILE = re.compile(
    r"\bfrom tests[\w.]*\.test_\w+ import|\bimport tests[\w.]*\.test_|\bfrom tests[\w.]* import (\([^)]*|.*)\btest_\w+"
)
"""Also in the text of a program that a test starts."""


def test_what_tests_share_lies_in_modules_that_are_no_tests() -> None:
    """So that a reader finds it, and moving a test breaks no other."""
    files = [file for folder in ("tests", "scripts") for file in (PACKAGE.parent / folder).rglob("*.py")]
    assert len(files) > 300  # also where all extensions are deleted
    found = {file.name: one[0] for file in files if (one := OF_A_TEST_FILE.search(file.read_text()))}
    assert found == {}, (
        "move what is shared into a module without test_ in its name, such as tests/integration/books.py"
    )
