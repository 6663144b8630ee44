"""What an engine with replicas of attention or pipeline stages cannot serve is refused."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.checks.model import check_model
from tests.fakes import LLAMA, MOE, tiny_config

REPLICATED = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
STAGES = {"engine.pipeline_parallel": 2, "weights.pause_mode": "drain"}


@pytest.mark.parametrize(
    ("hf", "changes", "field", "remedy"),
    [
        ({**LLAMA, "architectures": ["SeedOssForCausalLM"]}, STAGES, "pipeline_parallel", "no stages of SeedOss"),
        (LLAMA, {"engine.tensor_parallel": 2, "engine.data_parallel": 2}, "data_parallel", "Qwen3ForCausalLM"),
        (REPLICATED, {"engine.pipeline_parallel": 2}, "pipeline_parallel", "weights.pause_mode=abort or drain"),
        (REPLICATED, {**STAGES, "engine.pipeline_parallel": 5}, "pipeline_parallel", "only 4 layers"),
        ({**LLAMA, "tie_word_embeddings": True}, STAGES, "pipeline_parallel", "Llama"),
        (MOE, {**STAGES, "routing_replay.kind": "R3"}, "pipeline_parallel", "cannot report routed experts"),
    ],
)
def test_engine_shape_that_the_model_lacks_is_refused(
    hf: dict[str, Any], changes: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check_model(tiny_config(**changes), hf)
    assert caught.value.field == f"engine.{field}"


def test_engines_of_every_shape_that_fits_pass() -> None:
    check_model(tiny_config(**{"engine.tensor_parallel": 4, "engine.data_parallel": 2}), REPLICATED)
    check_model(tiny_config(**STAGES), LLAMA)


def test_stages_are_refused_in_engines_that_others_started() -> None:
    with pytest.raises(ConfigError, match="stock server"):
        tiny_config(**STAGES, **{"engine.urls": ["http://h:1"]})
