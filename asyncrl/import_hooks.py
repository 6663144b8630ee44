"""Import this module first in a process that imports much. It disables garbage collection until `done` is called.

During imports, Python's garbage collector repeatedly scans objects of which hardly any is garbage. That takes a quarter
of the import time of SGLang, Megatron and transformers.
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

gc.disable()


def done() -> None:
    """Enable garbage collection again, and freeze the existing objects.

    The collector does not scan frozen objects, so forked children go on sharing their memory.
    """
    gc.freeze()
    gc.enable()


def after_import(name: str, patch: Callable[[Any], None]) -> None:
    """Run `patch` on a module right after the module's own code, when it is imported."""
    sys.meta_path.insert(0, _AfterImport(name, patch))


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Hide an installed package in the block, so that libraries which can do without it do not import it. No-op if it
    is imported already."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # `import` then raises ImportError, and find_spec finds nothing
    try:
        yield
    finally:
        del sys.modules[package]


@contextmanager
def imported_without(package: str, library: str) -> Iterator[None]:
    """Let the block import `library` without `package`, which it can do without.

    What the block creates stays as it is. A later `import` of the library imports it anew, with the package. No-op if
    either of them is imported already.
    """
    if package in sys.modules or library in sys.modules:
        yield
        return
    with hidden(package):
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        del sys.modules[name]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Import hook for one module."""

    def __init__(self, name: str, patch: Callable[[Any], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
