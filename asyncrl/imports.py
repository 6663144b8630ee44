"""A user's own functions and classes, by import path."""

from __future__ import annotations

import importlib
from typing import Any

from asyncrl.errors import ConfigError


def load(path: str, field: str) -> Any:
    """What lies at an import path, module:name. Raises ConfigError for the field that named it."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(field, path, f"Must be an import path, module:name ({error}).") from None
