"""Versions of the packages that are installed, and those that the project is made for."""

from __future__ import annotations

import platform
from importlib import metadata

import asyncrl
from asyncrl import lock_file

MUST_MATCH = ("sglang", "smg", "megatron-core")
"""Packages whose internals are used: any other version breaks in ways that no test has seen."""
SHOULD_MATCH = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
ENGINE_ON_GPU = ("sglang-kernel", "flashinfer-python")
"""Packages without which an engine on a GPU does not start."""
TRANSFORMER_ENGINE = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
"""The parts of TransformerEngine as PyPI has it; a build from source is one package. With some of the parts, its import
fails, and so does Megatron's."""


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
