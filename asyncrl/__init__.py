"""Asynchronous RL for LLMs: Megatron trains while SGLang generates, with bounded staleness (README.md)."""

from pathlib import Path

__version__ = "0.1.0"
_PACKAGE = Path(__file__).parent
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
"""Folder of the settings and their defaults: inside the package in a wheel, beside it in a checkout."""
