"""What a model that sees cannot do is refused by field and remedy."""

from __future__ import annotations

import re
from typing import Any

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.checks.model import check_model
from tests.fakes import LLAMA, MOE, tiny_config

SEES = {
    **LLAMA,
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "vision_config": {"patch_size": 16, "deepstack_visual_indexes": [1, 2, 3]},
}
TRAINED = {"vision.tower": "trained"}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"algo.kl.reference_path": "/other"}, "algo.kl.reference_path", "with the policy's vision tower"),
        ({**TRAINED, "trainer.lora.rank": 8}, "vision.tower", "on frozen weights"),
        ({"routing_replay.kind": "R2", "algo.epochs": 2}, "routing_replay.kind", "no routed experts"),
        ({"trainer.pipeline_parallel": 2}, "trainer.pipeline_parallel", "The first 3 layers add features of images"),
        ({**TRAINED, "trainer.recompute.granularity": "full"}, "trainer.recompute.granularity", "set none"),
        (TRAINED, "weights.verify", "set it to false"),
    ],
)
def test_what_a_model_that_sees_cannot_do_is_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    hf = {**SEES, "num_hidden_layers": 4}
    check_model(tiny_config(), hf)
    check_model(tiny_config(**TRAINED, **{"weights.verify": False}), hf)
    check_model(tiny_config(**TRAINED), {**hf, "vision_config": {"patch_size": 14}})
    with pytest.raises(ConfigError, match=re.escape(remedy)) as caught:
        check_model(tiny_config(**changes), hf)
    assert caught.value.field == field


def test_vision_tower_gradients_are_not_overlapped() -> None:
    settings = {"trainer.data_parallel": 2, "trainer.overlap_grad_reduce": True}
    tiny_config(**settings)
    with pytest.raises(ConfigError, match="micro-batch without images") as caught:
        tiny_config(**settings, **TRAINED)
    assert caught.value.field == "trainer.overlap_grad_reduce"


def test_image_routing_replays_as_trainers_recorded_it() -> None:
    sees = {**MOE, "architectures": ["Qwen3VLMoeForConditionalGeneration"], "vision_config": SEES["vision_config"]}
    check_model(tiny_config(**{"routing_replay.kind": "R2", "algo.epochs": 2}), sees)
    with pytest.raises(ConfigError, match="each token of an image, and answers count an image once: set R2") as caught:
        check_model(tiny_config(**{"routing_replay.kind": "R3"}), sees)
    assert caught.value.field == "routing_replay.kind"
