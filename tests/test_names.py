"""One word, one thing: public class names are unique, no module hides one of the standard library, and what a test is
called can be read at once."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_NAME = 60  # characters of a test's name
MODULES = sorted(file for package in ("asyncrl", "recipes") for file in (ROOT / package).rglob("*.py"))


def test_public_class_names_are_unique() -> None:
    defined = defaultdict(list)
    for file in MODULES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


def test_no_module_shadows_the_standard_library() -> None:
    assert [str(file.relative_to(ROOT)) for file in MODULES if file.stem in sys.stdlib_module_names] == []


def test_names_of_tests_are_short() -> None:
    names = [
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name) > LONGEST_NAME] == []
