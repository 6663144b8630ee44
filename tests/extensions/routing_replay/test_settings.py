"""Routing replay is refused where it would replay nothing, and engines report experts only where they are replayed."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl import lookup
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.model import check_model
from tests.fakes import LLAMA, MOE, tiny_config

MIXTRAL = {**MOE, "architectures": ["MixtralForCausalLM"]}

NGRAM = {"engine.server_args": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}}
CACHED = {"engine.hicache": 64, "rollout.cache_key": "version"}


@pytest.mark.parametrize(
    ("hf", "changes", "field", "remedy"),
    [
        (LLAMA, {"routing_replay.kind": "R3"}, "routing_replay.kind", "has no routed experts"),
        (LLAMA, {"routing_replay.kind": "R2", "algo.epochs": 2}, "routing_replay.kind", "has no routed experts"),
        (MIXTRAL, {"routing_replay.kind": "R3"}, "routing_replay.kind", "Mixtral does not report"),
        (
            MOE,
            {"engine.hicache": 64, "rollout.cache_key": "version"},
            "routing_replay.kind",
            "forgets which experts",
        ),
    ],
)
def test_routing_replay_needs_experts_and_engines_that_tell_them(
    hf: dict[str, Any], changes: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check_model(tiny_config(**{"routing_replay.kind": "R3", **changes}), hf)
    assert caught.value.field == field


def test_routing_replay_that_the_engines_can_give_passes() -> None:
    check_model(tiny_config(**{"routing_replay.kind": "R3"}), MOE)
    check_model(tiny_config(**{"routing_replay.kind": "R2", "algo.epochs": 2}), MIXTRAL)


def test_recorded_routing_needs_a_second_step() -> None:
    with pytest.raises(ConfigError, match="With one optimizer step there is nothing to replay"):
        tiny_config(**{"routing_replay.kind": "R2"})


@pytest.mark.parametrize(("changes", "words"), [(NGRAM, "without their experts"), (CACHED, "forgets which experts")])
def test_engines_that_lose_experts_are_refused(changes: dict[str, Any], words: str) -> None:
    tiny_config(**changes)
    with pytest.raises(ConfigError, match=words) as caught:
        tiny_config(**changes, **{"routing_replay.kind": "R3"})
    assert caught.value.field == "routing_replay.kind"


def test_engines_keep_experts_only_where_replayed() -> None:
    flag = "enable_return_routed_experts"
    assert lookup.engine_arguments(tiny_config(**{"routing_replay.kind": "R3"}), gpu=False)[flag] is True
    assert flag not in lookup.engine_arguments(tiny_config(), gpu=False)


def test_the_old_name_is_refused_with_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"set routing_replay\.kind"):
        tiny_config(**{"algo.routing_replay": "R3"})
