"""The parts of scripts/bench_gpu.py are executed on a CPU before a GPU executes them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench_gpu import parts
from scripts.gpu_engines import SETTINGS, composed

ROOT = Path(__file__).parents[2]


@pytest.mark.integration
@pytest.mark.parametrize("name", [part.name for part in parts(quick=True, rehearse=True)])
def test_a_part_is_rehearsed(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/bench_gpu.py", "--rehearse", "--quick", "--out", str(tmp_path), "--only", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    (results,) = tmp_path.glob("*.json")
    found = json.loads(results.read_text())
    assert done.returncode == 0, found
    (part,) = found["parts"]
    assert (part["name"], part["status"]) == (name, "ok")
    assert part["figures"]
    assert found["rehearsal"]


@pytest.mark.integration
@pytest.mark.parametrize("spare", [False, True], ids=["trainer on their GPU", "trainer on its own"])
@pytest.mark.parametrize("name", SETTINGS)
def test_engines_of_every_setting_pass_checks_for_gpus(name: str, spare: bool, tmp_path: Path) -> None:
    setting = SETTINGS[name]
    engines = composed(name, tmp_path, spare=spare)
    assert len(engines) == 1
    for engine in engines:
        assert engine.env["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(setting.gpus + spare)))
        assert int(engine.argv[engine.argv.index("--base-gpu-id") + 1]) == spare + engines.index(engine)
        given = {flag.removeprefix("--").replace("-", "_") for flag in engine.argv if flag.startswith("--")}
        wanted = {"hicache_size": "engine.hicache", "load_format": "quantized.format"}
        for argument, field in wanted.items():
            assert (argument in given) == any(one.startswith(f"{field}=") for one in setting.overrides)
