"""Check of the installed packages against the versions that the project is made for."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata

import asyncrl
from asyncrl import lock_file
from asyncrl.launch.checks.findings import Finding, error, ok, warning
from asyncrl.launch.machine import MachineFacts

MUST_MATCH = ("sglang", "smg", "megatron-core")
"""Packages whose internals are used: any other version breaks in ways that no test has seen."""
SHOULD_MATCH = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
ENGINE_ON_GPU = ("sglang-kernel", "flashinfer-python")
"""Packages without which an engine on a GPU does not start."""
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
"""The parts of TransformerEngine as PyPI has it; a build from source is one package. With some of the parts, its import
fails, and so does Megatron's."""
INSTALL = "Install the pinned versions: asyncrl-install, or on a machine with GPUs pip install 'asyncrl[gpu]'."


def installed() -> dict[str, str]:
    """Return the versions of this process's packages and of Python, except missing packages."""
    found = {"python": platform.python_version(), "asyncrl": asyncrl.__version__}
    for name in (*MUST_MATCH, *SHOULD_MATCH, *ENGINE_ON_GPU, *TRANSFORMER_ENGINE):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def pinned(*, gpu: bool = False) -> dict[str, str]:
    """Return the versions pinned in requirements/cpu.txt, with which the GPU extra agrees, or those of the packages
    that only machines with GPUs need, from requirements/gpu.txt."""
    lock = lock_file().with_name("gpu.txt") if gpu else lock_file()
    lines = (line.partition("==") for line in lock.read_text().splitlines() if not line.startswith("#"))
    pins = {name.lower(): version.split()[0] for name, _, version in lines if version}
    return {
        name: pins[name] for name in ((*ENGINE_ON_GPU, *TRANSFORMER_ENGINE) if gpu else (*MUST_MATCH, *SHOULD_MATCH))
    }


def check_versions(machines: Sequence[MachineFacts], pins: Mapping[str, str]) -> list[Finding]:
    """Check the first machine against the pins, and all others against the first."""
    first, *others = machines
    found = _against_pins(first.versions, pins)
    for other in others:
        differing = sorted(
            name
            for name in first.versions.keys() | other.versions.keys()
            if first.versions.get(name) != other.versions.get(name)
        )
        if differing:
            what = ", ".join(
                f"{name} {first.versions.get(name, 'missing')} and {other.versions.get(name, 'missing')}"
                for name in differing
            )
            remedy = "Install the same environment on all machines, or one on their shared file system."
            found.append(error("versions", f"{first.name} and {other.name} differ: {what}", remedy))
    if not found:
        names = ", ".join(f"{name} {first.versions[name]}" for name in ("python", "asyncrl", *pins))
        found.append(ok("versions", names + (f", the same on {len(machines)} machines" if others else "")))
    return found


def _against_pins(versions: Mapping[str, str], pins: Mapping[str, str]) -> list[Finding]:
    found = []
    for name, pin in pins.items():
        mine = versions.get(name)
        if mine is None:
            found.append(error("versions", f"{name} is not installed, but asyncrl requires {pin}", INSTALL))
        elif mine.partition("+")[0] != pin:  # 2.13.0+cpu is a build of 2.13.0
            tell = error if name in MUST_MATCH else warning
            found.append(tell("versions", f"{name} {mine} is installed, but asyncrl requires {pin}", INSTALL))
    return found
