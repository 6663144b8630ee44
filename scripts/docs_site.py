"""Hooks of the documentation site (mkdocs.yml): the generated reference, the tutorials, the pages of extensions, and
links to files of the repository.

The pages are read on GitHub too, where links like ../asyncrl/algo/loss.py lead to the file. The site shows the path of
such a file instead, and refuses links to files that do not exist. The tutorials are notebooks; their cells and stored
outputs become pages. The page of an extension is its README.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from asyncrl.launch import help
from asyncrl.metrics import fields

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((?![a-z]+:)([^)#\s]+)(#[^)]*)?\)")
READMES = {file: f"extensions/{file.parent.name}.md" for file in sorted(ROOT.glob("asyncrl/extensions/*/README.md"))}
"""Pages that stand beside their code, with their place in the site."""
COMMANDS = {
    "asyncrl-train": "trains, records, replays and checks; `--help` lists every [setting](settings.md)",
    "asyncrl-engines": "adds engines to a run, and takes them away ([rollouts](../rollouts.md#add-engines-to-a-run))",
    "asyncrl-plan": "chooses the split of GPUs, lead and bound ([plans](../extensions/plan.md))",
    "asyncrl-inspect": "shows a recorded run in the terminal, or as a page ([its page](../extensions/view.md))",
    "asyncrl-watch": "serves a live page of runs from their files ([its page](../extensions/view.md))",
    "asyncrl-convert": "converts weights between the formats of Megatron and HF ([its page](../extensions/convert.md))",
    "asyncrl-envs": "installs environments of verifiers ([their page](../extensions/verifiers.md))",
    "asyncrl-install": "installs the CPU engine and the locked dependencies beside an installed wheel",
}
PYTHON = ("asyncrl.schema", "asyncrl.algo.registry", "asyncrl.algo.table", "asyncrl.envs.env", "asyncrl.rewards.reward")
"""Modules that users write against."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {"settings": _settings(), "metrics": _metrics(), "commands": _commands(), "python": _python()}
    for name, lines in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(lines)))
    for notebook in sorted((ROOT / "docs/tutorials").glob("*.ipynb")):
        content = "\n\n".join(_cells(notebook))
        files.append(File.generated(config, f"tutorials/{notebook.stem}.md", content=content))
    for readme, page in READMES.items():
        files.append(File.generated(config, page, content=readme.read_text()))
    return files


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of extensions to the navigation."""
    assert config.nav is not None
    config.nav.append({"Extensions": sorted(READMES.values())})
    return config


def _cells(notebook: Path) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown, each with its stored output."""
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        magic, _, rest = source.partition("\n")
        if magic.startswith("%%writefile"):
            yield f'```python title="{magic.split()[1]}"\n{rest}\n```'
        else:
            yield f"```bash\n{rest}\n```" if magic == "%%bash" else f"```python\n{source}\n```"
        for output in cell["outputs"]:
            yield f"```text\n{''.join(output['text']).rstrip()}\n```"
    yield f"[This page as a notebook]({notebook.name})"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside of the pages by the files' paths."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    source = {page: readme for readme, page in READMES.items()}.get(uri, ROOT / "docs" / uri)

    def shown(found: re.Match[str]) -> str:
        path = (source.parent / found[2]).resolve()
        place = READMES.get(path) or ("index.md" if path == ROOT / "README.md" else None)
        if path.is_relative_to(ROOT / "docs"):
            place = str(path.relative_to(ROOT / "docs"))  # another page, which mkdocs checks
        elif not path.exists():
            raise PluginError(f"{uri}: {found[2]} does not exist")
        if place:
            return f"[{found[1]}]({posixpath.relpath(place, posixpath.dirname(uri))}{found[3] or ''})"
        return f"{found[1]} (`{path.relative_to(ROOT)}`)" if "`" not in found[1] else f"`{path.relative_to(ROOT)}`"

    return LINK.sub(shown, markdown)


def _settings() -> Iterator[str]:
    yield "# Settings\n\nEvery field with its kind, default and meaning. Set one by `asyncrl-train FIELD=VALUE`.\n"
    defaults = _defaults()
    for section in help.sections():
        if section.name:
            yield f"## {section.name}\n\n{section.meaning}\n"
        for field in section.fields:
            value = defaults.get(field.name)
            default = "" if value is None else f", default `{value}`"
            yield f"**`{field.name}`** ({field.kind}{default})  \n{field.meaning}\n"
            for algorithm, settings in help.algorithms(field.name).items():
                listed = ", ".join(f"`{setting}={default}`" for setting, default in settings.items())
                yield f"- `{algorithm}`" + (f": {listed}" if listed else "")
            yield ""


def _defaults() -> dict[str, Any]:
    """Return the values of conf/train.yaml and of the groups that it names, where they are plain."""
    conf = ROOT / "conf"
    values = yaml.safe_load((conf / "train.yaml").read_text())
    groups = {
        group: option for item in values.pop("defaults") if isinstance(item, dict) for group, option in item.items()
    }
    found = _flat(values)
    for group, option in groups.items():
        file = conf / str(group) / f"{option}.yaml"
        if file.is_file():
            found = {**_flat({str(group): yaml.safe_load(file.read_text())}), **found}
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _metrics() -> Iterator[str]:
    yield "# Metrics\n\nFields of `metrics.jsonl`, `eval.jsonl` and `summary.json`, and of the sinks.\n"
    for table, rows in fields.tables().items():
        yield f"## {table.lower().replace('_', ' ')}\n\n| field | meaning |\n|---|---|"
        yield from (_row(name, meaning) for name, meaning in rows.items())
        yield ""


def _row(name: str, meaning: str) -> str:
    return f"| `{name}` | {meaning} |".replace("||", "\\|\\|")


def _commands() -> Iterator[str]:
    yield "# Commands\n\n| command | what it does |\n|---|---|"
    yield from (f"| `{name}` | {meaning} |" for name, meaning in COMMANDS.items())
    yield f"\n## asyncrl-train\n\n```\n{help.USAGE}```\n"


def _python() -> Iterator[str]:
    yield "# Python\n\nWhat agents, environments, rewards and algorithms of your own are written against.\n"
    yield from (f"::: {module}\n" for module in PYTHON)
