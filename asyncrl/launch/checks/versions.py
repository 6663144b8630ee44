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
GPU_INSTALL = "pip install --no-deps -r requirements/gpu.txt, or pip install 'asyncrl[gpu]'."
NVCC = (
    "Install the CUDA 13.0 toolkit, and set CUDA_HOME to its folder unless nvcc is in PATH or in /usr/local/cuda. The "
    "package nvidia-cuda-nvcc puts nvcc into the folder nvidia/cu13 of site-packages."
)
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


def check_gpu_engines(machines: Sequence[MachineFacts], pins: Mapping[str, str]) -> list[Finding]:
    """Check what engines on GPUs need on their machines: kernels, and the compiler of kernels."""
    found: list[Finding] = []
    for machine in machines:
        where = machine.name or "this machine"
        for name in ENGINE_ON_GPU:
            mine = machine.versions.get(name)
            if mine is None:
                text = f"{name} is not installed on {where}, but an engine on a GPU needs it"
                found.append(error("versions", text, GPU_INSTALL))
            elif mine.partition("+")[0] != pins[name]:
                text = f"{name} {mine} is installed on {where}, but asyncrl was locked with {pins[name]}"
                found.append(warning("versions", text, GPU_INSTALL))
        if not machine.nvcc:
            text = f"{where} has no nvcc, with which SGLang and flashinfer compile kernels when they first need them"
            found.append(error("nvcc", text, NVCC))
    return found or [ok("nvcc", machines[0].nvcc)] if machines else []


def check_gpu_trainers(machines: Sequence[MachineFacts], pins: Mapping[str, str], *, experts: bool) -> list[Finding]:
    """Check TransformerEngine on the machines of trainers on GPUs. `experts` says whether the model has routed ones."""
    cost = "norms, rotary embeddings and optimizer steps are not fused, and there is no FP8"
    if experts:
        cost += "; the routed experts of a layer run one after the other, without grouped matrix multiplication"
    found = []
    for machine in machines:
        where = machine.name or "this machine"
        mine = {name: machine.versions.get(name) for name in TRANSFORMER_ENGINE}
        missing = [name for name, version in mine.items() if version is None]
        other = [f"{name} {one}" for name, one in mine.items() if one and one.partition("+")[0] != pins[name]]
        if missing == [*TRANSFORMER_ENGINE]:
            found.append(warning("transformer-engine", f"not installed on {where}: {cost}", GPU_INSTALL))
        elif missing:
            text = f"{where} lacks {', '.join(missing)}; unless it was built from source, importing Megatron will fail"
            found.append(warning("transformer-engine", text, f"{GPU_INSTALL} Or uninstall all parts."))
        elif other:
            text = f"{', '.join(other)} on {where}, but asyncrl was locked with {pins[TRANSFORMER_ENGINE[0]]}"
            found.append(warning("transformer-engine", text, GPU_INSTALL))
    return found or [ok("transformer-engine", pins[TRANSFORMER_ENGINE[0]])] if machines else []


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
