"""Output of `asyncrl-train --help`: the fields and their meanings, from the docstrings in asyncrl/config and in the
extensions, and the groups in conf/ and in the recipes."""

from __future__ import annotations

import ast
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

CONFIG = Path(__file__).parents[1] / "config"
"""Folder of the config classes. They are parsed instead of imported, so that --help needs no pydantic."""
EXTENSIONS = CONFIG.with_name("extensions")
RECIPES = "asyncrl_recipes"
"""Package of the recipes: recipes/ in a clone. It is located and never imported, and a run without recipes needs none.
"""

ALGORITHMS = {
    "algo.advantage": "advantage.py",
    "algo.loss": "loss.py",
    "algo.correction": "correction.py",
}
"""Fields that name an algorithm and hold its settings (settings.Choice), and the name of the files of asyncrl/algo and
of extensions that define them."""

FIRST = [
    "mode",
    "run.name",
    "run.dir",
    "run.max_steps",
    "resume",
    "checkpoint.every",
    "record",
    "model.path",
    "task.train_file",
    "task.reward",
    "agent",
    "rollout.batch_groups",
    "rollout.group_size",
    "rollout.max_new_tokens",
    "rollout.max_staleness",
    "rollout.temperature",
    "algo.advantage",
    "algo.loss",
    "algo.kl.coefficient",
    "trainer.optimizer.lr",
    "trainer.tensor_parallel",
    "trainer.pipeline_parallel",
    "trainer.data_parallel",
    "trainer.lora.rank",
    "engine.count",
    "engine.tensor_parallel",
    "eval.questions",
    "eval.every",
    "cluster.placement",
    "sinks.names",
]
"""The fields that people set first: --help shows them, and --help all the others, too."""

USAGE = """\
asyncrl-train [--config FILE] [field=value | group=option] ...

Trains a language model with asynchronous RL: Megatron trainers and SGLang engines at the same time.

  asyncrl-train                                    the default run: SmolLM2-135M on CPU
  asyncrl-train experiment=tiny                    0.13M parameters, one to two minutes
  asyncrl-train experiment=tiny trainer.tensor_parallel=2 engine.count=2 rollout.max_staleness=4
  asyncrl-train --config my_run.yaml               settings from a file of your own (docs/quickstart.md)
  asyncrl-train --help all                         every field; --help rollout: those that begin with rollout
  asyncrl-train --cfg job                          print the composed settings without a run
  asyncrl-train --check ...                        report problems of a run without starting it
  eval "$(asyncrl-train -sc install=bash)"         shell completion (also zsh, fish)
"""


def group_options(conf: Path) -> dict[str, list[str]]:
    """Return the options of each group."""
    options = defaultdict[str, list[str]](list)
    for file in (file for folder in (conf, *further_confs()) for file in folder.glob("*/*.yaml")):
        options[file.parent.name].append(file.stem)
    return {group: sorted(options[group]) for group in sorted(options)}


def render(conf: Path, asked: str = "") -> str:
    """Return the help text: with the fields that people set first, or all, or those whose names begin as asked."""
    groups = [
        textwrap.fill(
            ", ".join(options),
            100,
            initial_indent=f"  {group:12} ",
            subsequent_indent=" " * 15,
        )
        for group, options in group_options(conf).items()
    ]
    if asked and asked != "all":
        named = list(_fields(lambda name: f"{name}.".startswith(f"{asked}.")))
        return "\n".join(named or _about(asked))
    fields = _fields(lambda name: asked == "all" or name in FIRST)
    more = [] if asked else ["", f"{len(field_names()) - len(FIRST)} more fields: asyncrl-train --help all"]
    return "\n".join([USAGE, "Groups (group=option):", *groups, "", "Fields (field=value):", *fields, *more])


def further_confs() -> list[Path]:
    """Return the conf/ folder of every extension and recipe that has one."""
    spec = find_spec(RECIPES)
    folders = [EXTENSIONS, *(spec.submodule_search_locations or () if spec else ())]
    return sorted(conf.resolve() for folder in folders for conf in Path(folder).glob("*/conf"))


def field_names() -> list[str]:
    """Return the dotted name of every field."""
    return [field.name for section in sections() for field in section.fields]


@dataclass(frozen=True)
class Field:
    """A setting."""

    name: str  # dotted
    kind: str
    meaning: str


@dataclass(frozen=True)
class FieldGroup:
    """The fields below one name, or a single field of the top level, which has no heading."""

    name: str
    meaning: str
    fields: list[Field]


@cache
def extensions() -> set[str]:
    """Return the names of the sections of the extensions in asyncrl/extensions."""
    return {name for folder in sorted(EXTENSIONS.glob("*/")) for name in _settings(folder)}


@cache
def sections() -> list[FieldGroup]:
    """Return all settings, from the sources of asyncrl/config and of its extensions."""
    classes = _classes(CONFIG)
    found, meanings = [], docstrings(classes["Config"])
    for top in _annotated(classes["Config"]):
        kind, name = ast.unparse(top.annotation), ast.unparse(top.target)
        if kind in classes:
            below = list(_below(classes, classes[kind], name))
            found.append(FieldGroup(name, _in_one_line(ast.get_docstring(classes[kind]) or ""), below))
        else:
            found.append(FieldGroup("", "", [Field(name, _readable(kind), _in_one_line(meanings[name]))]))
    for folder in sorted(EXTENSIONS.glob("*/")):
        settings = _settings(folder)
        own = classes | _classes(folder) if settings else {}
        for name, kind in settings.items():
            meaning = _in_one_line(ast.get_docstring(own[kind]) or "")
            found.append(FieldGroup(name, meaning, list(_below(own, own[kind], name))))
    return found


def _settings(folder: Path) -> dict[str, str]:
    """Return the classes of an extension's sections, by their names: `Settings = NAME` in extension.py, and
    `models = {"SECTION": NAME}`."""
    file, found = folder / "extension.py", {}
    for node in ast.walk(ast.parse(file.read_text())) if file.exists() else ():
        match node:
            case ast.Assign(targets=[ast.Name("Settings")], value=kind):
                found[folder.name] = ast.unparse(kind)
            case ast.Assign(targets=[ast.Name("models")], value=ast.Dict(keys, kinds)):
                found |= {ast.literal_eval(key): ast.unparse(one) for key, one in zip(keys, kinds, strict=True) if key}
    return found


def _classes(folder: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a package by name."""
    nodes = (node for file in folder.glob("*.py") for node in ast.parse(file.read_text()).body)
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _below(classes: dict[str, ast.ClassDef], section: ast.ClassDef, prefix: str) -> Iterator[Field]:
    for base in section.bases:
        if ast.unparse(base) in classes:
            yield from _below(classes, classes[ast.unparse(base)], prefix)
    meanings = docstrings(section)
    for field in _annotated(section):
        kind, name = ast.unparse(field.annotation), f"{prefix}.{_name(field)}"
        if kind in classes:
            yield from _below(classes, classes[kind], name)
        else:
            yield Field(name, _readable(kind), _in_one_line(meanings.get(ast.unparse(field.target), "")))


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _fields(wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the lines about the fields that are wanted."""
    for section in sections():
        if fields := [field for field in section.fields if wanted(field.name)]:
            yield "\n" + textwrap.fill(f"{section.name}: {section.meaning}", 100) if section.name else ""
            for field in fields:
                yield from _field(field)


def _about(asked: str) -> list[str]:
    """Return the lines about the fields that have this word in their name or meaning."""
    found = {
        field.name for section in sections() for field in section.fields if asked in f"{field.name} {field.meaning}"
    }
    return list(_fields(found.__contains__)) or [f"No field has {asked!r} in its name or meaning: see --help all."]


def _name(field: ast.AnnAssign) -> str:
    """Return the name by which a field is set: a field whose name is a Python keyword has an alias."""
    for keyword in field.value.keywords if isinstance(field.value, ast.Call) else ():
        if keyword.arg == "alias" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    return ast.unparse(field.target)


def _field(field: Field) -> Iterator[str]:
    yield textwrap.fill(f"  {field.name}  ({field.kind})", 100, subsequent_indent=" " * (len(field.name) + 5))
    if field.meaning:
        yield textwrap.fill(field.meaning, 100, initial_indent="      ", subsequent_indent="      ")
    for algorithm, settings in algorithms(field.name).items():
        defaults = ", ".join(f"{setting}={default}" for setting, default in settings.items())
        yield f"        {algorithm}" + (f"  {defaults}" if defaults else "")


def algorithms(field: str) -> dict[str, dict[str, str]]:
    """Return the algorithms that a field can name, each with the default values of its settings (algo/registry.py)."""
    found = {}
    name = ALGORITHMS.get(field)
    for file in [CONFIG.with_name("algo") / name, *sorted(EXTENSIONS.glob(f"*/{name}"))] if name else []:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(".register(" in ast.unparse(d) for d in node.decorator_list):
                defaults = [ast.unparse(default) if default else "?" for default in node.args.kw_defaults]
                names = [argument.arg for argument in node.args.kwonlyargs]
                found[node.name] = dict(zip(names, defaults, strict=True))
    return found


def docstrings(section: ast.ClassDef) -> dict[str, str]:
    """Return the docstring below each field."""
    found = {}
    for field, below in zip(section.body, section.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(field.target)] = str(below.value.value)
    return found


def _annotated(section: ast.ClassDef) -> list[ast.AnnAssign]:
    return [node for node in section.body if isinstance(node, ast.AnnAssign)]


KINDS = {
    "Choice": "name, and FIELD.SETTING for its settings",
    "Dtype": "auto, bfloat16, float32",
    "Count": "integer ≥ 1",
    "Natural": "integer ≥ 0",
    "Million": "integer 1..1000000",
    "Positive": "number > 0",
    "NonNegative": "number ≥ 0",
    "AboveOne": "number > 1",
    "Share": "number 0..1",
    "Part": "number between 0 and 1",
    "Bounds": "two numbers: least and most",
    "float": "number",
    "int": "integer",
    "str": "text",
    "bool": "true or false",
    "dict[Name, TaskConfig]": "name: task",
    "Parameters": "name: value",
    "dict[str, Any]": "name: value",
    "ServerArgs": "name: value",
    "Fp8Config": "name: value",
    "dict[Name, RoleConfig]": "name: role",
    "dict[Name, str]": "name: text",
    "list[Parameters]": "list of name: value",
    "list[str]": "list of texts",
    "list[Text]": "list of texts",
}


def _readable(kind: str) -> str:
    parts = kind.split(" | ")
    text = " or ".join(_kind(part) for part in parts if part != "None")
    return text + (", or null" if "None" in parts else "")


def _kind(name: str) -> str:
    if name.startswith("list[") and name not in KINDS:
        return f"list of {_kind(name[5:-1])}"
    return name[8:-1].replace("'", "") if name.startswith("Literal[") else KINDS.get(name, name)
