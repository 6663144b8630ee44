"""Check of an installed TransformerEngine, before Megatron imports it."""

from __future__ import annotations

import importlib
import importlib.util

from asyncrl.errors import LaunchError

REMEDY = (
    "Install the packages of requirements/gpu.txt, or remove TransformerEngine (pip uninstall transformer_engine "
    "transformer_engine_cu13 transformer_engine_torch): the trainer then has Megatron's own layers and optimizer."
)


def check(*, gpu: bool) -> None:
    """Raise LaunchError if TransformerEngine is installed on a machine with a GPU but cannot be imported.

    Without one of its packages or CUDA libraries, importing it raises any of the errors below. Megatron catches only
    ImportError, and not in all places, so that it would fail later without naming the cause, or run without the layers
    that were asked for.
    """
    if not gpu or importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, AssertionError, RuntimeError, OSError) as error:
        what = f"TransformerEngine is installed but cannot be imported: {type(error).__name__}: {error}"
        raise LaunchError(f"{what}. {REMEDY}") from error
