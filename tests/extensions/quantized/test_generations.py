"""Settings of engines on GPUs of a generation that SGLang does not support them on."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.extensions.quantized.fits import FIELD
from asyncrl.launch.checks.machines import check_gpu_kinds
from tests.launch.checks.worlds import AMPERE, BLACKWELL, HOPPER, check, job, nodes, placed


@pytest.mark.parametrize(
    ("gpu", "kind", "remedy"),
    [
        (AMPERE, "fp8", f"{AMPERE} into Marlin's layout.*set int8, or fp8_simulated"),
        (BLACKWELL, "fp8", r"set \+engine.server_args.fp8_gemm_backend=triton"),
        (BLACKWELL, "int8", "set fp8, or int8_simulated"),
    ],
)
def test_what_sglang_lacks_on_these_gpus_is_refused(gpu: str, kind: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check(gpu, **{FIELD: kind})
    assert caught.value.field == FIELD
    check(HOPPER, **{FIELD: kind})


def test_what_the_remedies_name_passes() -> None:
    check(AMPERE, **{FIELD: "int8"})
    check(BLACKWELL, **{FIELD: "fp8", "engine.server_args": {"fp8-gemm-backend": "triton"}})
    check(BLACKWELL, **{FIELD: "int8_simulated"})


def test_gpus_of_which_nothing_is_known_pass() -> None:
    config = job(**{FIELD: "fp8", "engine.dtype": "bfloat16"})
    seats = [seat for one in placed(config, 1, 2).engines for seat in one]
    check_gpu_kinds(config, seats, nodes(config, 1, 2), ())
