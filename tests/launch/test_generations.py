"""Settings of engines on GPUs of a generation that SGLang does not support them on."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.generations import check_generations
from tests.launch.preflight.worlds import AMPERE, BLACKWELL, HOPPER, check, job, nodes, placed


@pytest.mark.parametrize(
    ("gpu", "changes", "field", "remedy"),
    [
        (AMPERE, {"quantization": "fp8"}, "quantization", f"{AMPERE} into Marlin's layout.*set int8, or fp8_simulated"),
        (BLACKWELL, {"quantization": "fp8"}, "quantization", r"set \+engine.server_args.fp8_gemm_backend=triton"),
        (BLACKWELL, {"quantization": "int8"}, "quantization", "set fp8, or int8_simulated"),
    ],
)
def test_what_sglang_does_not_support_on_the_engines_gpus_is_refused(
    gpu: str, changes: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check(gpu, **changes)
    assert caught.value.field == f"engine.{field}"
    check(HOPPER, **changes)


def test_what_the_remedies_name_passes() -> None:
    check(AMPERE, quantization="int8")
    check(BLACKWELL, quantization="fp8", server_args={"fp8-gemm-backend": "triton"})
    check(BLACKWELL, quantization="int8_simulated")


def test_gpus_of_which_nothing_is_known_pass() -> None:
    config = job(**{"engine.quantization": "fp8", "engine.dtype": "bfloat16"})
    seats = [seat for one in placed(config, 1, 2).engines for seat in one]
    check_generations(config.engine, seats, nodes(config, 1, 2), ())
