"""The project's file and the exact versions in its locks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PIN = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(\[[a-z,]+\])?==(?P<version>[A-Za-z0-9.!]+)")
ROOT = Path(__file__).resolve().parent.parent


def pins(lines: list[str]) -> dict[str, str]:
    """{normalised name: version}; any line that is not one exact pin fails."""
    matches = {line: PIN.fullmatch(line) for line in lines}
    assert not [line for line, match in matches.items() if match is None]
    return {re.sub(r"[._-]+", "-", m["name"]).lower(): m["version"] for m in matches.values() if m}


def lock(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return pins([line for line in lines if not line.startswith("#")])


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
