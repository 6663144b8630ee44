"""What the modes of scripts/bench_async.py stand for."""

from __future__ import annotations

import pytest

from scripts import sizes
from scripts.bench_async import FULL, MODES, STREAM

SCALE = 80.0
BY_NAME = {mode.name: mode for mode in MODES}


@pytest.mark.parametrize(("staging", "seconds"), [("stream", {"fill": 0.0} | STREAM), ("full", FULL)])
def test_modes_of_a_large_model_publish_as_long_as_computed(staging: str, seconds: dict[str, float]) -> None:
    name, values = next((name, values) for name, gpus, values in sizes.ROWS if gpus == 1024 and "235b" in name)
    config = sizes.load(f"experiment={name}", values=[*sizes.settings(values), f"weights.staging={staging}"])
    computed = sizes.size(config, sizes.MODELS[name]).publish
    assert seconds == pytest.approx({"fill": computed.fill, "pause": computed.pause}, abs=0.01)


@pytest.mark.parametrize("name", ["bound 4, stream", "bound 4, full", "bound 4, overlap"])
def test_trainer_fills_buckets_beside_generating_engines(name: str) -> None:
    mode, plain = BY_NAME[name], BY_NAME["bound 4"].setting(5, SCALE)
    setting = mode.setting(5, SCALE)
    assert setting.train_fixed - plain.train_fixed == pytest.approx(mode.fill / SCALE)
    assert setting.pause == pytest.approx(mode.pause / SCALE)
    assert setting.overlap == name.endswith("overlap")
