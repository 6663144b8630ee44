"""The checksums in SGLang equal those computed from the HF folder, for every parameter of every family.

Every family is loaded at every degree, and some in other shapes of an engine, by SGLang's model runner
(engine_ranks.py); in a campaign, they are also served.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx
import pytest
import torch

from asyncrl.engine.server import server_argv
from asyncrl.models.families import of_type
from asyncrl.network.ports import free_port
from asyncrl.parallel import EngineParallel
from asyncrl.platforms import without_gpu
from asyncrl.weights.checksum import Checksums, ExpectedChecksums, differing, parse
from asyncrl.weights.folder import HFFolder
from tests.integration.engine_jobs import EVERYTHING, MODELS, engine_of, named, run_jobs, write_model

pytestmark = pytest.mark.integration

START_TIMEOUT = 300.0
ROUTED_MODELS = tuple(name for name in MODELS if name.startswith(("qwen3_moe", "mixtral", "glm4", "deepseek", "kimi")))
REPLICATED_MODELS = ("qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v3, whole queries")
STAGED_MODELS = tuple(
    name
    for name, (kind, _) in MODELS.items()
    if name not in ("llama, tied", "llama, padded") and of_type(kind).serving.stages
)
SHAPED = [
    *((name, EngineParallel(tp=2, ep=2)) for name in ROUTED_MODELS),
    *((name, EngineParallel(tp=4, ep=2 if name in ROUTED_MODELS else 1, dp=2)) for name in REPLICATED_MODELS),
    *((name, EngineParallel(pp=2)) for name in STAGED_MODELS),
    EVERYTHING,
]
USUAL = [
    *((name, EngineParallel(tp)) for name in MODELS for tp in (1, 2)),
    *(("mixtral", EngineParallel(tp=2, ep=2)), ("deepseek_v3", EngineParallel(tp=4, ep=2, dp=2))),
    *(("qwen3, tied", EngineParallel(pp=2)), ("llama", EngineParallel(pp=2)), EVERYTHING),
]
CASES = [*USUAL, *(case for case in SHAPED if case not in USUAL)]


@contextmanager
def serving(model: Path, shape: EngineParallel) -> Iterator[str]:
    """Run one engine, started as by the launcher, and yield its address."""
    config = engine_of(shape)
    url, log = f"http://127.0.0.1:{free_port('127.0.0.1')}", model.with_suffix(".log")
    argv = server_argv(config.engine, model, url, gpu=False, seed=0)
    env = without_gpu().engine_environment(config.engine.ranks)
    with log.open("w") as out:
        server = subprocess.Popen(argv, env={**os.environ, **env}, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _healthy(url):
            assert server.poll() is None, f"the engine ended:\n{log.read_text()[-5000:]}"
            assert time.monotonic() < deadline, f"no engine within {START_TIMEOUT} s:\n{log.read_text()[-5000:]}"
            time.sleep(0.5)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def expected_of(folder: Path, shape: EngineParallel) -> Checksums:
    hf = json.loads((folder / "config.json").read_text())
    expected = ExpectedChecksums(hf, shape, dtype=torch.bfloat16)
    with HFFolder(folder) as source:
        for name in source.names():
            expected.add(name, source.read(name))
    return expected.result()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    found = {name: base / name.replace(", ", "-").replace(" ", "-") for name in MODELS}
    for name, folder in found.items():
        write_model(folder, *MODELS[name])
    return found


Loaded = Callable[[bool], tuple[dict[tuple[str, EngineParallel], Path], Path]]


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Return files with the checksums of models in shapes, loaded by SGLang without a server, and a log: of the usual
    ones, or of the others."""

    @cache
    def load(usual: bool) -> tuple[dict[tuple[str, EngineParallel], Path], Path]:
        jobs, outs, base = [], {}, tmp_path_factory.mktemp("checksums")
        for name, shape in CASES:
            if ((name, shape) in USUAL) != usual:
                continue
            engine, folder = engine_of(shape).engine, folders[name]
            outs[name, shape] = base / f"{folder.name}.{named(shape)}.json"
            args = server_argv(engine, folder, "http://127.0.0.1:30000", gpu=False, seed=0)[3:]
            env = without_gpu().engine_environment(engine.ranks)
            jobs.append({"args": args, "env": env, "out": str(outs[name, shape])})
        return outs, run_jobs(base, jobs)

    return load


@pytest.mark.parametrize(
    ("name", "shape"),
    [pytest.param(*case, marks=[] if case in USUAL else pytest.mark.campaign) for case in CASES],
    ids=named,
)
def test_sglang_loads_what_is_expected_of_every_parameter(
    name: str, shape: EngineParallel, folders: dict[str, Path], loaded: Loaded
) -> None:
    outs, log = loaded((name, shape) in USUAL)
    out = outs[name, shape]
    assert out.exists(), "\n".join(log.read_text()[-50_000:].split("Traceback")[1:])[-5000:]
    answered = json.loads(out.read_text())
    assert differing(expected_of(folders[name], shape), answered) == []
    assert len(answered) == shape.ranks
    assert all(len(rank) > 5 for rank in answered)


SERVED = [  # latent attention loads, but an engine with this project's attention for CPU cannot run it
    pytest.param(*case) for case in CASES if not case[0].startswith(("deepseek", "kimi", "glm4_moe_lite"))
]


@pytest.mark.campaign  # every publish to engines in test_weights.py and test_engine_shapes.py is verified
@pytest.mark.parametrize(("name", "shape"), SERVED, ids=named)
def test_engine_answers_with_every_expected_checksum(
    name: str, shape: EngineParallel, folders: dict[str, Path]
) -> None:
    with serving(folders[name], shape) as url:
        answered = parse(httpx.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=60).json())
    assert differing(expected_of(folders[name], shape), answered) == []
    assert len(answered) == shape.ranks
