"""README and docs name only what exists: files, headings, settings, metrics, and names of the code."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl import rewards
from asyncrl.config import load
from asyncrl.launch.compose import algorithm_overrides
from asyncrl.launch.help import ALGORITHMS, algorithms, field_names
from asyncrl.metrics import fields
from asyncrl.metrics.fields import unknown
from asyncrl.removed import removal
from tests.fakes import compose_values

ROOT = Path(__file__).resolve().parents[1]
EXTENSIONS = ROOT / "asyncrl/extensions"
RECIPES = sorted((ROOT / "recipes").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CHANGELOG.md",
    ROOT / "ops/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(EXTENSIONS.rglob("README.md")),
    *RECIPES,
]
ids = [str(page.relative_to(ROOT).with_suffix("")) for page in PAGES]
RESULTS = [*sorted((ROOT / "results").rglob("*.md")), ROOT / "tests/cuda_stub/README.md"]
"""Pages about the past, whose settings and metrics may be gone."""
MOST_PAGES, MOST_WORDS, MOST_WIDE = 20, 23_250, 4
"""Most pages and words of docs/, and most lines of commands that a reader must scroll sideways. They only fall; the
aims are 20, 25,000 and 0."""

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(asyncrl-\w+|python|pip|docker|make|sudo|salloc|sbatch) \S*[=/.-]")
SETTING = re.compile(r"\+{0,2}((?:[a-z_]+\.)+[a-z_]+)(?==|$)")
PATH = re.compile(
    r"(?<![\w/.-])((?:asyncrl|docs|results|ops|recipes|tests|scripts|conf|requirements)/[\w./-]+\.(?:py|md|yaml|txt|sh|sbatch))\b"
)
PROVEN = re.compile(r"^\|.*\| (?:test|shown by) \|\n((?:\|.*\n)+)", re.MULTILINE)
"""The rows of a table whose last column names the tests that show them."""
IMPORT = re.compile(r"\b((?:asyncrl|asyncrl_recipes)(?:\.[a-z_0-9]+)+):(\w+)")

SETTINGS = set(field_names()) | {
    f"{field}.{setting}" for field in ALGORITHMS for own in algorithms(field).values() for setting in ("name", *own)
}
FREE = {name for name in SETTINGS if name.rsplit(".")[-1].endswith("params")} | {
    *("engine.server_args", "requests.fields", "teacher.server_args", "judge.server_args", "slurm.sbatch"),
    *("eval.sets", "tasks", "task", "sinks.wandb", "sinks.mlflow"),
}
"""Settings whose keys are the user's own, or those of another program."""
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}
FILES = ("py", "md", "json", "jsonl", "yaml", "msgpack")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    dead = []
    for link in LINK.findall(page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_are_named_exist(page: Path) -> None:
    assert [path for path in PATH.findall(page.read_text()) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_tests_that_tables_name_as_proof_exist(page: Path) -> None:
    rows = [row for table in PROVEN.findall(page.read_text()) for row in table.splitlines()]
    named = [name for row in rows for name in CODE.findall(row.rpartition(" | ")[2])]
    assert [name for name in named if not any((ROOT / "tests").rglob(name))] == []


def test_every_package_has_a_row_in_the_developers_table() -> None:
    table, packages = (ROOT / "AGENTS.md").read_text(), (ROOT / "asyncrl").glob("*/__init__.py")
    assert sorted(file.parent.name for file in packages if f"`asyncrl/{file.parent.name}`" not in table) == []


def test_every_extension_has_a_row_in_their_table() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(\1/README\.md\) \| .+ \|$", (EXTENSIONS / "README.md").read_text(), re.MULTILINE
    )
    assert rows == sorted(file.parent.name for file in EXTENSIONS.glob("*/__init__.py"))


def test_guides_stay_short_and_their_commands_narrow() -> None:
    texts = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    assert len(texts) <= MOST_PAGES
    assert sum(len(text.split()) for text in texts) <= MOST_WORDS
    lines = [line for page in PAGES for line in page.read_text().splitlines()]
    assert len([line for line in lines if COMMAND.match(line) and len(line) > 100]) <= MOST_WIDE


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_settings_that_are_named_exist(page: Path) -> None:
    named = set()
    for code in CODE.findall(page.read_text()):
        for word in code.split():
            if (found := SETTING.match(word)) and found[1].rpartition(".")[2] not in FILES:
                named.add(found[1])
    wrong = []
    for name in named:
        top = name.partition(".")[0]
        if page.name == "CHANGELOG.md" and removal(name):
            continue  # what an earlier version had
        own = any(name == free or name.startswith(f"{free}.") for free in FREE)
        if top in SECTIONS and name not in SETTINGS and not own and not any(s.startswith(f"{name}.") for s in SETTINGS):
            wrong.append(name)
    assert sorted(wrong) == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_metrics_that_are_named_exist(page: Path) -> None:
    known = {name for table in fields.tables().values() for name in table}
    prefixes = {name.partition("/")[0] for name in known if "/" in name}
    named = {code for code in CODE.findall(page.read_text()) if re.fullmatch(r"[a-z_]+(?:/[a-z_0-9@]+)+", code)}
    asked = {name for name in named if name.partition("/")[0] in prefixes and not (ROOT / "asyncrl" / name).exists()}
    assert sorted(name for name in unknown(asked) if name not in known) == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_names_of_the_code_exist(page: Path) -> None:
    missing = []
    for module, name in IMPORT.findall(page.read_text()):
        file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        file = file if file.exists() else file.with_suffix("") / "__init__.py"
        tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
        if name not in {getattr(node, "name", None) for node in tree.body}:
            missing.append(f"{module}:{name}")
    assert missing == []


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of every asyncrl-train that a page shows in a block, without what stands for others; not of
    those with options (-sc), or with the extension that tests/test_extension.py writes."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        for command in [
            part for line in lines for part in line.split("&&") if part.strip().startswith("asyncrl-train")
        ]:
            _, *words = shlex.split(command, comments=True)
            found.append([word for word in words if word not in ("…", "...", "--check")])
    return [words for words in found if not any(word.startswith(("-", "+extensions.")) for word in words)]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_settings_of_commands_that_are_shown_are_accepted(page: Path) -> None:
    for words in commands(page):
        load(compose_values(*algorithm_overrides(words)))


def shown(page: str, begins: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the YAML blocks of a page that begin so, and set the environment variables that they name."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    for name in re.findall(r"\b[A-Z_]+_(?:KEY|TOKEN)\b", "".join(blocks)):
        monkeypatch.setenv(name, "a key")
    return [yaml.safe_load(block) for block in blocks if block.startswith(begins)]


def test_rewards_that_are_shown_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = shown("rewards.md", "use:", monkeypatch)
    assert specs  # those of extensions: tests/rewards/test_docs.py
    for spec in specs:
        rewards.build(spec["use"], spec.get("params"))
