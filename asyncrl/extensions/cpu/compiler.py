"""Torch's compiler, imported only if something is compiled.

Optimizers, operators on meta tensors and init_process_group import torch._dynamo (a second of CPU time) in order to
exclude themselves from compilation. Nothing of Megatron or SGLang is compiled on a CPU.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch

NAME = "torch._dynamo"
ALONE = f"{NAME}._trace_wrapped_higher_order_op"
"""Submodule that needs no other, and that transformers imports for its masks."""


def postpone() -> bool:
    """Postpone the import of torch._dynamo until a submodule is imported, or a name is looked up that
    `_PostponedCompiler` lacks. Returns False if it is imported already."""
    if NAME in sys.modules:
        return False
    torch._dynamo = sys.modules[NAME] = _PostponedCompiler(NAME)  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _SubmoduleFinder())
    return True


def unchanged(function: Any = None, *_: Any, **__: Any) -> Any:
    """Decorate a function by leaving it as it is, with or without arguments of the decorator."""
    return function if callable(function) else lambda decorated: decorated


class _PostponedCompiler(types.ModuleType):
    """Stand-in for torch._dynamo."""

    __path__ = ()  # type: ignore[assignment]  # makes it a package, whose submodules are looked for
    allow_in_graph = assume_constant_result = disable = staticmethod(unchanged)
    graph_break = staticmethod(lambda *_, **__: None)  # called by optimizers
    trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)  # called by init_process_group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(), name)


def _real() -> types.ModuleType:
    """Put the real package in the place of the stand-in."""
    if isinstance(sys.modules.get(NAME), _PostponedCompiler):
        del sys.modules[NAME], torch._dynamo  # type: ignore[attr-defined]
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _SubmoduleFinder)]
        if alone := sys.modules.get(ALONE):
            setattr(importlib.import_module(NAME), ALONE.rpartition(".")[2], alone)
    return importlib.import_module(NAME)


class _SubmoduleFinder(importlib.abc.MetaPathFinder):
    """Import hook that imports the real package before the first of its submodules, except ALONE."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        if name == ALONE:
            file = Path(torch.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        _real()
        if (module := sys.modules.get(name)) is None:
            return importlib.util.find_spec(name)
        # The package has imported it. Python would take the module's own spec here, and run its code again.
        module.__spec__ = importlib.util.spec_from_loader(name, _Loaded(module))
        return module.__spec__


class _Loaded(importlib.abc.Loader):
    """Loader of a module that is loaded already."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return self._module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._spec
