"""Tests of SGLang's own arguments, of speculative decoding by them, and of HiCache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.generation import MOST_DRAFTS
from asyncrl.engine.server import expert_args, server_argv
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.machines import check_platforms
from tests.fakes import tiny_config

ARGS = "engine.server_args"
NGRAM = {ARGS: {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}}
EAGLE = {
    ARGS: {"speculative-algorithm": "EAGLE", "speculative_draft_model_path": "/draft"},
    "weights.transport": "tensor",
}
CACHED = {"engine.hicache": 64, "rollout.cache_key": "version"}


@pytest.mark.parametrize(
    ("base", "field", "value", "words"),
    [
        (CACHED, "rollout.cache_key", "group", "caches of old weights"),
        (CACHED, ARGS, {"hicache_storage_backend": "file"}, "beyond their weights"),
        ({}, ARGS, {"disaggregation_mode": "prefill"}, "both prefills and decodes"),
        (
            NGRAM,
            ARGS,
            {**NGRAM[ARGS], "speculative-accept-threshold-acc": 0.5},
            "would not be the model's",
        ),
    ],
)
def test_what_does_not_fit_is_refused(base: dict[str, Any], field: str, value: Any, words: str) -> None:
    tiny_config(**base)
    with pytest.raises(ConfigError, match=words) as caught:
        tiny_config(**{**base, field: value})
    assert caught.value.field.startswith(field)


def test_deterministic_engines_draft_nothing_with_one_cache() -> None:
    alone = {"deterministic": True, "rollout.max_staleness": 0}
    for base in (NGRAM, CACHED):
        with pytest.raises(ConfigError) as caught:
            tiny_config(**base, **alone)
        assert caught.value.field == "deterministic"


def test_requests_leave_room_for_drafts() -> None:
    assert tiny_config().engine.draft_room == 0
    assert tiny_config(**NGRAM).engine.draft_room == 12
    assert tiny_config(**EAGLE).engine.draft_room == 2 * MOST_DRAFTS


def test_engines_get_sglangs_arguments() -> None:
    engine = tiny_config(**EAGLE, **CACHED).engine
    argv = server_argv(engine, Path("/model"), "http://127.0.0.1:1", gpu=True, seed=0)
    assert argv[argv.index("--speculative-algorithm") + 1] == "EAGLE"
    assert argv[argv.index("--hicache-size") + 1] == "64"
    assert "--enable-hierarchical-cache" in argv


def test_experts_on_gpus_run_on_kernels_that_keep_weights() -> None:
    assert expert_args(tiny_config().engine, gpu=True) == {"moe_runner_backend": "triton"}
    assert expert_args(tiny_config().engine, gpu=False) == {}
    exchanged = {"engine.server_args": {"moe_a2a_backend": "deepep"}, "weights.verify": False}
    assert expert_args(tiny_config(**exchanged).engine, gpu=True) == {}


BACKENDS = {ARGS: {"attention_backend": "triton", "sampling_backend": "pytorch"}}


def test_engines_on_gpus_get_the_named_backends() -> None:
    for base, wanted in ((BACKENDS, True), ({}, False)):
        argv = server_argv(tiny_config(**base).engine, Path("/model"), "http://127.0.0.1:1", gpu=True, seed=0)
        assert ("--attention-backend" in argv, "--sampling-backend" in argv) == (wanted, wanted)
        assert not wanted or argv[argv.index("--attention-backend") + 1] == "triton"
        assert not wanted or argv[argv.index("--sampling-backend") + 1] == "pytorch"


@pytest.mark.parametrize(
    ("base", "field"),
    [
        (NGRAM, f"{ARGS}.speculative_algorithm"),
        (EAGLE, f"{ARGS}.speculative_algorithm"),
        (CACHED, "engine.hicache"),
        (BACKENDS, f"{ARGS}.attention_backend"),  # pytorch's sampling is that of CPUs, too
        ({ARGS: {"sampling_backend": "flashinfer"}}, f"{ARGS}.sampling_backend"),
    ],
)
def test_cpus_do_not_draft_and_have_their_own_backends(base: dict[str, Any], field: str) -> None:
    check_platforms(tiny_config(**base), 1)
    with pytest.raises(ConfigError, match="CPUs") as caught:
        check_platforms(tiny_config(**base), 0)
    assert caught.value.field == field
