"""The command line of one SGLang server (pure), and the wait until it serves."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.config import Engine

# What the pure-PyTorch path on CPU needs; SGLang's defaults name CUDA backends.
CPU_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",  # with cpu_attention.py registered in its place
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,  # an idle scheduler would otherwise burn a core
}


DELTA_LOADER = "asyncrl.engine.delta.load"
"""What loads changes in an engine; SGLang takes only loaders that it was started with."""


def server_argv(engine: Engine, model: Path, url: str, *, gpu: bool, seed: int, **more: str | int | None) -> list[str]:
    """Arguments of one engine; `more` are further ones of SGLang's, `engine.server_args` wins over everything."""
    address = urlsplit(url)
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "host": address.hostname,
        "port": address.port,
        "dtype": engine.dtype,
        "tp_size": engine.tensor_parallel,
        "max_total_tokens": engine.max_total_tokens,
        "max_running_requests": engine.max_running_requests,
        "weight_version": "0",  # version 0 is what the run starts from
        "skip_tokenizer_init": True,  # token ids in, token ids out: text never enters an engine
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "stream_interval": engine.stream_interval,
        "random_seed": seed,
        "log_level": "warning",
        **more,
        **({} if gpu else CPU_ARGS),
        **engine.server_args,
    }
    return [sys.executable, "-m", "asyncrl.engine.serve", *_flags(arguments)]


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False and value is not None:
            flags += [flag, str(value)]
    return flags


def server_env(engine: Engine, *, gpu: bool) -> dict[str, str]:
    """Environment of one engine."""
    if gpu:
        return {}
    bind = "|".join(str(core) for core in range(engine.tensor_parallel))
    return {"SGLANG_CPU_OMP_THREADS_BIND": bind} if engine.tensor_parallel > 1 else {}
