"""Asynchronous RL for LLMs: Megatron trains while SGLang generates, with bounded staleness (README.md)."""

from pathlib import Path

__version__ = "0.1.0"
_PACKAGE = Path(__file__).parent
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"
"""Folder of the settings and their defaults: inside the package in a wheel, beside it in a checkout."""


def lock_file(name: str = "cpu.txt") -> Path:
    """Return the path of a lock in requirements/, which lies inside the package in a wheel and beside it in a
    checkout. Ends the program if there is none."""
    for folder in (_PACKAGE, _PACKAGE.parent):
        if (lock := folder / "requirements" / name).is_file():
            return lock
    raise SystemExit(f"asyncrl: no requirements/{name} in {_PACKAGE} or beside it; reinstall asyncrl")
