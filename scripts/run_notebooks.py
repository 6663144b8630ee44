"""Execution of the tutorials (docs/tutorials).

    python scripts/run_notebooks.py [--write] NOTEBOOK.ipynb ...

Each notebook runs in a new folder and in a process of its own. The first cell that fails ends the command with its
traceback. With --write, the notebook file gets the outputs of this execution; otherwise they are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 900.0
"""Deadline of a notebook, many times what it takes."""


def execute(notebook: Path, folder: Path) -> list[str]:
    """Run a notebook in a folder, and return what each code cell printed. Raises RuntimeError with the traceback, and
    subprocess.TimeoutExpired after SECONDS."""
    binaries = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # without resolving .venv's link
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--inside", str(notebook.resolve())],
        cwd=folder,
        env={
            **os.environ,
            "PATH": binaries,
            "IPYTHONDIR": str(folder / ".ipython"),
            "NO_COLOR": "1",
            "SHELLOPTS": "pipefail",  # for bash: a cell fails if any command of a pipe does
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"{notebook.name} failed:\n{done.stdout}\n{done.stderr}")
    outputs: list[str] = json.loads(done.stdout.splitlines()[-1])
    return outputs


def code_cells(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def _inside(notebook: Path) -> None:
    """Run the cells of a notebook in this process, and print their outputs as one line of JSON."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    sys.path.insert(0, "")
    shell = InteractiveShell.instance()
    outputs = []
    for cell in code_cells(json.loads(notebook.read_text())):
        with capture_output(display=False) as captured:
            result = shell.run_cell("".join(cell["source"]), store_history=False)
        if not result.success:
            print(captured.stdout, captured.stderr, sep="\n", file=sys.stderr)
            sys.exit(1)
        outputs.append(captured.stdout)
    print(json.dumps(outputs))


def _write(notebook: Path, outputs: list[str]) -> None:
    content = json.loads(notebook.read_text())
    for number, (cell, text) in enumerate(zip(code_cells(content), outputs, strict=True), 1):
        lines = [line.rstrip() + "\n" for line in text.splitlines()]
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    notebook.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="store the outputs in the notebooks")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for notebook in arguments.notebooks:
        if arguments.inside:
            _inside(notebook)
            continue
        with tempfile.TemporaryDirectory() as folder:
            outputs = execute(notebook, Path(folder))
        if arguments.write:
            _write(notebook, outputs)
        else:
            print(notebook.name, *outputs, sep="\n")


if __name__ == "__main__":
    main()
