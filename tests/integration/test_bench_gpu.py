"""The parts of scripts/bench_gpu.py are executed on a CPU before a GPU executes them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from asyncrl.engine.server import server_argv, server_env
from asyncrl.weights.checksum import CpuHash
from scripts.bench_gpu import parts
from scripts.gpu_engines import SETTINGS, composed, write_draft
from tests.fakes import tiny_config
from tests.integration.test_checksum import run_jobs

ROOT = Path(__file__).parents[2]


def rehearsed(folder: Path, *names: str) -> None:
    """Rehearse these parts, and check that they give figures."""
    command = [sys.executable, "scripts/bench_gpu.py", "--rehearse", "--quick", "--out", str(folder), "--only", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + (folder / "bench_gpu.md").read_text()
    found = json.loads((folder / "bench_gpu.json").read_text())
    assert [part["name"] for part in found["parts"]] == list(names)
    assert all(part["figures"] and part["status"] == "ok" for part in found["parts"])
    assert found["rehearsal"]


SHORT = ("engine-ngram",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(part.name, marks=pytest.mark.integration if part.name in SHORT else pytest.mark.campaign)
        for part in parts(quick=True, rehearse=True)
    ],
)
def test_a_part_is_rehearsed(name: str, tmp_path: Path) -> None:
    rehearsed(tmp_path, name)


@pytest.mark.integration
@pytest.mark.parametrize("spare", [False, True], ids=["trainer on their GPU", "trainer on its own"])
@pytest.mark.parametrize("name", SETTINGS)
def test_engines_of_every_setting_pass_the_checks_before_a_start_on_gpus(
    name: str, spare: bool, tmp_path: Path
) -> None:
    setting = SETTINGS[name]
    engines = composed(name, tmp_path, spare=spare)
    assert len(engines) == (2 if name == "pair" else 1)
    for engine in engines:
        assert engine.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(setting.gpus + spare)))
        assert int(engine.argv[engine.argv.index("--base-gpu-id") + 1]) == spare + engines.index(engine)
        given = {flag.removeprefix("--").replace("-", "_") for flag in engine.argv if flag.startswith("--")}
        wanted = {"speculative_algorithm": "speculative", "hicache_size": "hicache", "load_format": "quantization"}
        for argument, field in wanted.items():
            assert (argument in given) == any(one.startswith(f"engine.{field}=") for one in setting.overrides)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_sglang_loads_every_tensor_of_a_draft_model(name: str, tmp_path: Path) -> None:
    """As its class does on any device; whether a step with it works, only a GPU shows."""
    write_draft(tmp_path / "draft", SETTINGS[name].draft)
    engine = tiny_config(**{"engine.dtype": "bfloat16"}).engine
    argv = server_argv(engine, tmp_path / "draft", "http://127.0.0.1:30000", gpu=False, seed=0)
    log = run_jobs(tmp_path, [{"args": argv[3:], "env": server_env(engine, gpu=False), "out": str(tmp_path / "out")}])
    assert (tmp_path / "out").exists(), log.read_text()[-5000:]
    (loaded,) = json.loads((tmp_path / "out").read_text())
    held, parts_of = load_file(tmp_path / "draft" / "model.safetensors"), {}
    for key in sorted(held, key=lambda key: "qkv".find(key.rpartition("_proj")[0][-1:])):
        fused = re.sub(r"\.[qkv]_proj", ".qkv", re.sub(r"\.(gate|up)_proj", ".gate_up", key))
        parts_of.setdefault(fused, CpuHash()).update(held[key])
    missing = {key for key, one in parts_of.items() if one.hexdigest() not in loaded.values()}
    assert missing <= {"d2t"}  # the numbers of the draft's tokens, which are no parameter
    assert len(loaded) == len(parts_of) - len(missing) + (name == "eagle")  # whose output layer is the model's
