"""One word, one thing: public class names are unique, and no module hides one of the standard library."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(file for package in ("asyncrl", "recipes") for file in (ROOT / package).rglob("*.py"))


def test_public_class_names_are_unique() -> None:
    defined = defaultdict(list)
    for file in MODULES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}


def test_no_module_has_the_name_of_a_module_of_the_standard_library() -> None:
    assert [str(file.relative_to(ROOT)) for file in MODULES if file.stem in sys.stdlib_module_names] == []
