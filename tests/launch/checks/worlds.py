"""Runs on machines that are not there: what they would tell, and model folders in small."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.launch.checks.findings import Finding
from asyncrl.launch.checks.machines import check_gpu_kinds
from asyncrl.launch.checks.run import preflight
from asyncrl.launch.checks.versions import pinned
from asyncrl.launch.cluster import cluster_of
from asyncrl.launch.machine import Gpu, MachineFacts
from asyncrl.launch.main import main
from asyncrl.launch.placement import Node, Placement, place, ports_wanted
from asyncrl.launch.plan import ProcessSpec
from asyncrl.launch.prepare import Preparation
from tests.fakes import JOB, Machines, tiny_config
from tests.forks import forked

AMPERE, HOPPER, BLACKWELL = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GB200"
GB = 10**9
TENSORS = {"model.embed_tokens.weight": (16, 4), "model.norm.weight": (4,), "lm_head.weight": (16, 4)}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 0,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run asyncrl-train experiment=tiny in this folder, outside of any job."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    return forked(main, "experiment=tiny", f"run.dir={cwd}/run", *arguments, cwd=cwd, env=plain)


def job(**changes: Any) -> Config:
    """The tiny experiment as a job."""
    return tiny_config(**{**JOB, "cluster.host": None, **changes})


def found(config: Config, tmp_path: Path) -> dict[str, Finding]:
    """What a check says, by field."""
    return {one.field: one for one in preflight(Preparation(config, tmp_path / "run", cluster_of(config)))}


def nodes(config: Config, count: int, gpus: int) -> list[Node]:
    """Machines with addresses of their own."""
    ports = tuple(range(20000, 20000 + ports_wanted(config)))
    visible = tuple(str(number) for number in range(gpus))
    return [Node(f"node{number}", f"10.0.0.{number}", visible, ports, "eth0") for number in range(count)]


def placed(config: Config, count: int, gpus: int) -> Placement:
    return place(config, nodes(config, count, gpus))


def machine(
    name: str = "node0",
    gpus: int = 0,
    gb: float = 80,
    ram: float = 500,
    nvcc: str = "/usr/local/cuda/bin/nvcc",
    **versions: str | None,
) -> MachineFacts:
    """One that has what the project is made for, unless `versions` (with _ for -) say otherwise; None removes one."""
    mine = {"python": "3.11.7", "asyncrl": "0.1.0", **pinned(), **(pinned(gpu=True) if gpus else {})}
    changed = {package.replace("_", "-"): version for package, version in versions.items()}
    mine = {package: version for package, version in {**mine, **changed}.items() if version is not None}
    cards = tuple(Gpu(number, "NVIDIA H100 80GB HBM3", int(gb * GB), f"GPU-{number}") for number in range(gpus))
    return MachineFacts(name, mine, cards, int(ram * GB), nvcc)


def of_job(tmp_path: Path, count: int, **changes: Any) -> dict[str, Finding]:
    """What a check of a job on so many machines says, by field."""
    config = job(**changes)
    machines = [machine(f"node{number}") for number in range(count)]
    allocation = Machines(config, nodes(config, count, 0), machines)
    return {one.field: one for one in preflight(Preparation(config, tmp_path / "run", allocation))}


def write_model(folder: Path, *, shards: int = 1) -> Path:
    """A whole folder; of several shards with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    names = sorted(TENSORS)
    parts = [names[number::shards] for number in range(shards)]
    files = ["model.safetensors"] if shards == 1 else [f"model-{n + 1}-of-{shards}.safetensors" for n in range(shards)]
    for file, part in zip(files, parts, strict=True):
        write_shard(folder / file, {name: TENSORS[name] for name in part})
    if shards > 1:
        owner = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
    return folder


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Zeros in float32."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def check(gpu: str, **changes: Any) -> None:
    """Check a job on two GPUs, of which the first, the trainer's, is of the supported generation."""
    config = job(**{"engine.dtype": "bfloat16", **changes})
    known = machine(gpus=2)
    known = replace(known, gpus=(known.gpus[0], replace(known.gpus[1], name=gpu)))
    seats = [seat for one in placed(config, 1, 2).engines for seat in one]
    check_gpu_kinds(config, seats, nodes(config, 1, 2), [known])


ENGINE = ProcessSpec("engine-0", [], {}, restarts=2, url="http://e0")
ROUTER = ProcessSpec("router", [], {}, restarts=2)
