"""Command line and environment of one SGLang server. The functions are pure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from asyncrl.config import AuxiliaryModelConfig, EngineConfig, cache_tokens
from asyncrl.engine import warmup
from asyncrl.parallel import EngineParallel
from asyncrl.platforms import chosen

NO_PROXY = {"NO_PROXY": "*", "no_proxy": "*"}
"""Disables proxies: clients would otherwise use a proxy of the environment for requests that carry keys of the run."""


DETERMINISTIC_ENV = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
"""Environment of deterministic engines and trainers. Compilation stays on: without it, FlexAttention in a trainer on a
GPU computes dense scores, and SGLang on a GPU needs no help, because its deterministic mode turns off compiled prefills
itself and draws tokens with a compiled sampler."""


def deterministic_args(*, gpu: bool) -> dict[str, Any]:
    """Return the arguments that make an answer a function of weights, prompt and seed alone.

    SGLang honours seeds only with enable_deterministic_inference, whose GPU kernels give a request the same bits in
    every batch. Other platforms may need more.
    """
    return {"enable_deterministic_inference": True, **chosen(gpu=gpu).deterministic_arguments}


def shape_args(shape: EngineParallel) -> dict[str, Any]:
    """Return the arguments that divide the ranks of an engine, as far as they divide anything."""
    sizes = {"ep_size": shape.ep, "dp_size": shape.dp, "pp_size": shape.pp}
    return {"enable_dp_attention": shape.dp > 1, **{name: size for name, size in sizes.items() if size > 1}}


def expert_args(engine: EngineConfig, *, gpu: bool) -> dict[str, Any]:
    """Return the argument that chooses the kernels of routed experts. SGLang would choose FlashInfer's on Blackwell,
    which keep weights in a layout of their own, so that no later version could be loaded. Kernels that exchange tokens
    between ranks (moe_a2a_backend) bring their own."""
    exchanged = engine.server_args.get("moe_a2a_backend") not in (None, "none")
    return {"moe_runner_backend": "triton"} if gpu and not exchanged else {}


def server_argv(engine: EngineConfig, model: Path, url: str, *, gpu: bool, seed: int, **more: Any) -> list[str]:
    """Return the command line of one engine.

    `more` are further arguments of SGLang. `engine.server_args` overrides all others.
    """
    return _argv(
        engine,
        model,
        url,
        gpu=gpu,
        **shape_args(engine.parallel),
        **{
            "max_running_requests": engine.max_running_requests,
            "weight_version": "0",  # the weights that the run starts from
            "incremental_streaming_output": True,
            "stream_interval": engine.stream_interval,
            "random_seed": seed,
            "enable_metrics": engine.metrics,
            "enable_hierarchical_cache": engine.hicache is not None,
            "hicache_size": engine.hicache,
            **expert_args(engine, gpu=gpu),
            **more,
        },
    )


def frozen_argv(section: AuxiliaryModelConfig, model: Path, url: str, *, gpu: bool, **more: Any) -> list[str]:
    """Return the command line of an engine of a model that is not trained."""
    return _argv(section, model, url, gpu=gpu, max_running_requests=section.max_running, **section.arguments, **more)


def _argv(section: EngineConfig | AuxiliaryModelConfig, model: Path, url: str, *, gpu: bool, **own: Any) -> list[str]:
    address = urlsplit(url)
    assert section.dtype != "auto", "the launcher resolves it (launch/precision.py); SGLang's auto means something else"
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "host": address.hostname,
        "port": address.port,
        "dtype": section.dtype,
        "tp_size": section.tensor_parallel,
        "max_total_tokens": cache_tokens(section, gpu=gpu),
        "skip_tokenizer_init": True,  # requests and answers are token ids, never text
        "skip_server_warmup": True,  # it would run while the engine already counts as up
        "warmups": warmup.NAME if gpu else warmup.IMAGES,
        "log_level": "warning",
        **own,
        **chosen(gpu=gpu).engine_arguments,
        **section.server_args,
    }
    return [sys.executable, "-m", "asyncrl.engine.serve", *flags(arguments)]


def flags(arguments: dict[str, Any]) -> list[str]:
    """Return arguments as a command line has them. Those that are None or False are left out."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not False and value is not None:
            argv += [flag, *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]
    return argv
