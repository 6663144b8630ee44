"""Checks of what parts on GPUs need on their machines: kernels, the compiler of kernels, TransformerEngine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from asyncrl.config import on_gpu
from asyncrl.launch.checks.findings import Finding, error, ok, warning
from asyncrl.launch.checks.versions import ENGINE_ON_GPU, TRANSFORMER_ENGINE, pinned
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.prepare import Preparation
from asyncrl.models.architectures import megatron_arguments

GPU_INSTALL = "pip install --no-deps -r requirements/gpu.txt, or pip install 'asyncrl[gpu]'."
NVCC = (
    "Install the CUDA 13.0 toolkit, and set CUDA_HOME to its folder unless nvcc is in PATH or in /usr/local/cuda. The "
    "package nvidia-cuda-nvcc puts nvcc into the folder nvidia/cu13 of site-packages."
)


def check_software(prepared: Preparation) -> Iterator[Finding]:
    """Check the packages and the compiler that only parts on GPUs need, on the machines of these parts."""
    config, cluster, placed, pins = prepared.chosen.config, prepared.cluster, prepared.placement, pinned(gpu=True)
    known = {node.name: machine for node, machine in zip(cluster.nodes, cluster.machines, strict=False)}
    on_gpus = [name for name, section in config.fleets.items() if on_gpu(section, prepared.gpus)]
    serving = dict.fromkeys(seat.node.name for name in on_gpus for seat in placed.fleets.get(name, ()))
    yield from check_gpu_engines([known[name] for name in serving if name in known], pins)
    if on_gpu(config.trainer, prepared.gpus) and "model" in prepared.weights:
        training = dict.fromkeys(seat.node.name for seat in placed.trainers)
        machines = [known[name] for name in training if name in known]
        experts = any(megatron_arguments(prepared.hf["model"]).get("moe_layer_freq", []))
        yield from check_gpu_trainers(machines, pins, experts=experts)


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
