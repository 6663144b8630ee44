"""Tests of the settings of speculative decoding, of HiCache, and of the training of multi-token prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.speculation import speculative_args
from asyncrl.engine.server import duty_args, expert_args, server_argv
from asyncrl.errors import ConfigError
from asyncrl.launch.checks import check_gpu_features, check_model
from tests.fakes import tiny_config

NGRAM = {"engine.speculative": "ngram"}
EAGLE = {"engine.speculative": "eagle", "engine.draft_model": "/models/draft", "weights.transport": "tensor"}
MTP = {"engine.speculative": "mtp", "weights.transport": "tensor"}
TRAINED = {"trainer.mtp": 0.1, "trainer.layers": "local"}
CACHED = {"engine.hicache": 64, "rollout.cache_key": "version"}


@pytest.mark.parametrize(
    ("base", "field", "value", "words"),
    [
        (EAGLE, "engine.draft_model", None, "needs the folder of a draft model"),
        (NGRAM, "engine.draft_model", "/models/draft", "has no draft model"),
        (NGRAM, "engine.draft_tokens", 1, "set 2 or more"),
        ({}, "engine.draft_tokens", 4, "drafts nothing"),
        (NGRAM, "algo.routing_replay", "R3", "without their experts"),
        (NGRAM, "engine.server_args", {"speculative-accept-threshold-acc": 0.5}, "would not be the model's"),
        (EAGLE, "weights.transport", "disk", "set auto, tensor or distributed"),
        (MTP, "weights.transport", "delta", "set auto, tensor or distributed"),
        (MTP, "engine.quantization", "fp8", "set fp8_simulated"),
        (TRAINED, "trainer.pipeline_parallel", 2, "supports 1 only"),
        (TRAINED, "trainer.layers", "auto", "supports local only"),
        (CACHED, "rollout.cache_key", "group", "caches of old weights"),
        (CACHED, "engine.server_args", {"hicache_storage_backend": "file"}, "beyond their weights"),
        (CACHED, "algo.routing_replay", "R3", "forgets which experts"),
    ],
)
def test_what_does_not_fit_is_refused(base: dict[str, Any], field: str, value: Any, words: str) -> None:
    tiny_config(**base)
    with pytest.raises(ConfigError, match=words) as caught:
        tiny_config(**{**base, field: value})
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize("base", [EAGLE, MTP, CACHED])
@pytest.mark.parametrize(
    ("field", "cluster"),
    [
        ("cluster.lend", {"cluster.elastic": "act", "rollout.max_running_groups": "auto", "cluster.lend": True}),
        (
            "cluster.placement",
            {"cluster.placement": "colocated", "weights.pause_mode": "retract", "rollout.max_staleness": 1},
        ),
    ],
)
def test_engines_that_release_their_memory_have_neither_draft_models_nor_host_caches(
    base: dict[str, Any], field: str, cluster: dict[str, Any]
) -> None:
    tiny_config(**cluster, **NGRAM)
    with pytest.raises(ConfigError, match="unset engine.hicache" if base is CACHED else "use ngram") as caught:
        tiny_config(**{**base, **cluster})
    assert caught.value.field == field


def test_deterministic_engines_draft_nothing_and_cache_in_one_place() -> None:
    alone = {"deterministic": True, "rollout.max_staleness": 0}
    for base in (NGRAM, CACHED):
        with pytest.raises(ConfigError) as caught:
            tiny_config(**base, **alone)
        assert caught.value.field == "deterministic"


def test_engines_get_sglangs_arguments() -> None:
    assert speculative_args(tiny_config().engine) == {}
    chain = speculative_args(tiny_config(**EAGLE, **{"engine.draft_tokens": 4}).engine)
    assert chain == {
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": "/models/draft",
        "speculative_num_draft_tokens": 4,
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
    }
    engine = tiny_config(**MTP, **CACHED).engine
    argv = server_argv(engine, Path("/model"), "http://127.0.0.1:1", gpu=True, seed=0)
    assert argv[argv.index("--speculative-algorithm") + 1] == "NEXTN"
    assert argv[argv.index("--hicache-size") + 1] == "64"
    assert "--enable-hierarchical-cache" in argv
    assert "--speculative-num-draft-tokens" not in argv, "SGLang chooses by the model"
    decoding = duty_args(engine, "decode", 0)
    assert "--hicache-size" not in server_argv(
        engine, Path("/model"), "http://127.0.0.1:1", gpu=True, seed=0, **decoding
    )


def test_experts_on_gpus_run_on_kernels_that_leave_their_weights_as_they_were_loaded() -> None:
    assert expert_args(tiny_config().engine, gpu=True) == {"moe_runner_backend": "triton"}
    assert expert_args(tiny_config().engine, gpu=False) == {}
    exchanged = {"engine.server_args": {"moe_a2a_backend": "deepep"}, "weights.verify": False}
    assert expert_args(tiny_config(**exchanged).engine, gpu=True) == {}


@pytest.mark.parametrize(("base", "field"), [(EAGLE, "speculative"), (MTP, "speculative"), (CACHED, "hicache")])
def test_cpus_draft_with_ngrams_only_and_have_one_cache(base: dict[str, Any], field: str) -> None:
    check_gpu_features(tiny_config(**NGRAM), 0)
    check_gpu_features(tiny_config(**base), 1)
    with pytest.raises(ConfigError, match="CPUs") as caught:
        check_gpu_features(tiny_config(**base), 0)
    assert caught.value.field == f"engine.{field}"


@pytest.mark.parametrize(
    ("base", "field", "words"),
    [
        (MTP, "engine.speculative", "has 0 layers of multi-token prediction"),
        (TRAINED, "trainer.mtp", "has 0 layers of multi-token prediction"),
        (EAGLE, "engine.draft_model", "has no config.json"),
    ],
)
def test_drafts_of_layers_and_models_that_are_not_there_are_refused(
    base: dict[str, Any], field: str, words: str
) -> None:
    hf = {
        "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64,
        "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=words) as caught:
        check_model(tiny_config(**base), hf)
    assert caught.value.field == field
