"""SGLang starts with the arguments of every shipped experiment on a GPU, as far as its parser can tell."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_stub.experiments import EXPERIMENTS
from tests.cuda_stub.step import settings, write_model

MODULES = (
    "sgl_kernel",
    "sgl_kernel.flash_attn",
    "flashinfer",
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.layers.moe.fused_moe_triton.layer",
    "sglang.srt.models.llama",
    "sglang.srt.models.qwen3",
    "sglang.srt.models.qwen3_moe",
    "sglang.srt.models.deepseek_v2",
    "sglang.srt.managers.scheduler",
    "sglang.srt.entrypoints.http_server",
)
PARSED = ("device", "dtype", "tp_size", "max_running_requests", "stream_interval", "enable_deterministic_inference")


def import_all() -> list[str]:
    """Import what an engine on a GPU imports. Returns the errors."""
    from tests.cuda_stub import device

    device.install()
    failed = []
    for name in MODULES:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001
            failed.append(f"{name}: {type(error).__name__}: {error}")
    return failed


def parse_all(folder: Path) -> dict[tuple[str, bool], dict[str, Any]]:
    """Parse the engine's command line of every experiment with SGLang's own parser, as it is and deterministic."""
    from sglang.srt.server_args import prepare_server_args

    from asyncrl.engine.server import deterministic_args, server_argv
    from tests.cuda_stub import device

    device.install()
    found = {}
    for name, case in EXPERIMENTS.items():
        engine = settings(case).engine
        if engine.dtype == "auto":
            engine = engine.model_copy(update={"dtype": "bfloat16"})  # which the launcher chooses on GPUs
        write_model(folder / name, case, engine.dtype)
        for deterministic in (False, True):
            more = deterministic_args(gpu=True) if deterministic else {}
            argv = server_argv(engine, folder / name, "http://127.0.0.1:30000", gpu=True, seed=0, **more)
            parsed = prepare_server_args(argv[3:])  # after python -m module
            found[name, deterministic] = {field: getattr(parsed, field) for field in PARSED}
    return found


SHAPE = {"tensor_parallel": 4, "expert_parallel": 4, "data_parallel": 2, "pipeline_parallel": 2}
SHAPED = ("tp_size", "ep_size", "dp_size", "pp_size", "enable_dp_attention", "disaggregation_mode")


def parse_shapes(folder: Path) -> dict[str, Any]:
    """Parse the command line of an engine that is divided in every way."""
    from sglang.srt.server_args import prepare_server_args

    from asyncrl.engine.server import server_argv
    from tests.cuda_stub import device

    device.install()
    case = EXPERIMENTS["qwen3_30b_a3b"]
    engine = settings(case).engine.model_copy(update={"dtype": "bfloat16", **SHAPE})
    write_model(folder, case, "bfloat16")
    argv = server_argv(engine, folder, "http://127.0.0.1:30000", gpu=True, seed=0)
    parsed = prepare_server_args(argv[3:])
    return {field: getattr(parsed, field) for field in SHAPED}


@pytest.fixture(scope="module")
def parsed(apart: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Any]:
    return apart(parse_all, tmp_path_factory.mktemp("models"))


def test_the_modules_of_a_gpu_engine_import(apart: Callable[..., Any]) -> None:
    assert apart(import_all) == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_sglang_parses_the_arguments_of_every_experiment(experiment: str, parsed: dict[tuple[str, bool], Any]) -> None:
    engine = settings(EXPERIMENTS[experiment]).engine
    for deterministic in (False, True):
        found = parsed[experiment, deterministic]
        assert found["device"] in (None, "cuda")  # None: SGLang chooses at its start
        assert found["tp_size"] == engine.tensor_parallel
        assert found["stream_interval"] == engine.stream_interval
        assert found["max_running_requests"] == engine.max_running_requests
        assert found["enable_deterministic_inference"] == deterministic


def test_sglang_parses_the_arguments_of_engines_of_every_shape(apart: Callable[..., Any], tmp_path: Path) -> None:
    shape = dict(zip(SHAPED, (4, 4, 2, 2, True, "null"), strict=True))
    assert apart(parse_shapes, tmp_path) == shape
