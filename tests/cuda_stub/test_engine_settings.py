"""SGLang accepts, as far as it goes before it touches a GPU, the engines that the first day on GPUs starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_engines import SETTINGS, composed

SHAPE = ("tp_size", "ep_size", "dp_size", "pp_size")
EXPECTED: dict[str, dict[str, Any]] = {
    "triton": {"attention_backend": "triton", "sampling_backend": "pytorch"},
    "hicache": {"enable_hierarchical_cache": True, "hicache_size": 1, "disable_radix_cache": False},
    "fp8": {"load_format": "dummy"},
    "int8": {"load_format": "dummy"},
}


def resolved(folder: Path, gpu: str) -> dict[str, list[dict[str, Any]]]:
    """Resolve the arguments of the engines of every setting on a GPU, with the number of GPUs that they see."""
    from tests.cuda_stub import device

    device.install(getattr(device, gpu))

    from sglang.srt.server_args import prepare_server_args

    found: dict[str, list[dict[str, Any]]] = {}
    for name in SETTINGS:
        for spec in composed(name, folder / name, spare=False):
            args = prepare_server_args(spec.argv[spec.argv.index("asyncrl.engine.serve") + 1 :])
            args.resolve_once()
            args.check_server_args()
            visible = len(spec.env["CUDA_VISIBLE_DEVICES"].split(","))
            found.setdefault(name, []).append({**args.resolved_dict(), "visible": visible})
    return found


@pytest.mark.parametrize("gpu", ["H100", "B200"])
def test_sglang_resolves_the_arguments_of_every_setting(gpu: str, apart: Callable[..., Any], tmp_path: Path) -> None:
    engines = apart(resolved, tmp_path, gpu)
    assert engines.keys() == SETTINGS.keys()
    for name, found in engines.items():
        overrides = dict(one.split("=") for one in SETTINGS[name].overrides)
        shape = [int(overrides.get(f"engine.{kind}_parallel", 1)) for kind in ("tensor", "expert", "data", "pipeline")]
        for args in found:
            assert [args[field] for field in SHAPE] == shape, name
            assert args["visible"] == SETTINGS[name].gpus, name
            assert {field: args[field] for field in EXPECTED.get(name, {})} == EXPECTED.get(name, {}), name
            assert args["disable_overlap_schedule"] == (shape[3] > 1), name
            assert args["moe_runner_backend"] == "triton", name
            assert not args["disable_radix_cache"], name
