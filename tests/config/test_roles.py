"""Roles with adapters of their own, as they are configured: which adapters there are, and which past versions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config import Config
from asyncrl.config.lora import resident_adapters
from asyncrl.config.roles import PastConfig
from asyncrl.engine.adapters import ServedAdapters, adapter_names
from asyncrl.errors import ConfigError
from asyncrl.launch.checks.model import _roles
from asyncrl.settings import require
from tests.fakes import tiny_config

OVERLAP = {"trainer.overlap_grad_reduce": True, "trainer.data_parallel": 2}
TURNS = {"weights.pause_mode": "retract", "weights.transport": "auto", "rollout.max_staleness": 1}
PAST = {"every": 2, "keep": 3}


def config(roles: dict[str, dict[str, Any]], **changes: Any) -> Config:
    lora = {"trainer.lora.rank": 4, "weights.lora": "versions"}
    return tiny_config(**{**lora, "agents.roles": roles, **changes})


def test_trained_adapters_are_those_of_the_roles() -> None:
    assert tiny_config().agents.adapters == ("policy",)
    assert tiny_config().agents.adapter_of("anything") == "policy"
    two = config({"solver": {"adapter": "b"}, "proposer": {"adapter": "a"}, "critic": {"adapter": "b"}})
    assert two.agents.adapters == ("a", "b")
    assert two.agents.adapter_of("critic") == "b"
    with pytest.raises(ConfigError, match=r"agents.roles.*'judge'.*agents.roles.NAME.adapter"):
        two.agents.adapter_of("judge")
    against_past = config({"opponent": {"past": PAST}})
    assert against_past.agents.adapters == ("policy",)
    assert against_past.agents.adapter_of("anything") == "policy"


@pytest.mark.parametrize(
    ("roles", "changes", "message"),
    [
        ({"a": {"adapter": "b"}}, {"trainer.lora.rank": None}, "trainer.lora.rank"),
        ({"a": {"past": PAST}}, {"weights.lora": "merged"}, "weights.lora.*weights.lora=versions"),
        ({"a": {"adapter": "b"}}, {"weights.lora": "merged"}, "weights.lora"),
        (
            {"a": {"adapter": "b"}},
            {"weights.lora": "auto", "trainer.lora.targets": ["q_proj"]},
            "or remove agents.roles",
        ),
        ({"a": {"adapter": "b", "past": PAST}}, {}, "No role trains the adapter b"),
        ({"a": {"past": PAST}, "b": {"past": {"every": 1, "keep": 1}}}, {}, "with other settings"),
        ({"a": {"adapter": "b/c"}}, {}, "agents.roles.a.adapter"),
        ({"a": {"adapter": "b"}, "c": {}}, OVERLAP, "overlap_grad_reduce.*set false"),
        ({"a": {"adapter": "b"}, "b": {}}, {"rollout.max_staleness": 15}, "rollout.max_staleness.*36 adapters"),
    ],
)
def test_what_cannot_be_trained_or_served_is_refused_by_name(
    roles: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(roles, **changes)


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_roles_are_refused_for_models_without_served_adapters(family: str) -> None:
    for name, roles in (("a", {"a": {"adapter": "b"}}), ("old", {"old": {"past": PAST}})):
        with pytest.raises(ConfigError, match=rf"agents.roles: got \['{name}'\].*engines serve adapters of"):
            require(one := config(roles), _roles(one, {"architectures": [family]}))
    require(one := config({"a": {}}), _roles(one, {"architectures": [family]}))


def test_roles_of_one_adapter_without_engines_need_no_lora() -> None:
    assert tiny_config(**{"agents.roles": {"player": {"adapter": "policy"}}}).agents.adapters == ("policy",)


@given(every=st.integers(1, 5), keep=st.integers(1, 5), staleness=st.integers(0, 4), newest=st.integers(0, 60))
def test_engines_keep_what_an_episode_may_have_drawn(every: int, keep: int, staleness: int, newest: int) -> None:
    past = PastConfig(every=every, keep=keep)
    admitted = range(max(0, newest - staleness), newest + 1)
    drawn = {version for at in admitted for version in past.drawn(at)}
    assert all(1 <= len(past.drawn(at)) <= keep and past.drawn(at)[-1] <= at for at in admitted)
    assert drawn == set(past.needed(newest, staleness))
    assert len(drawn - set(admitted)) <= keep


def test_evaluation_keeps_the_past_version_it_began_with() -> None:
    made = config({"opponent": {"past": PAST}}, **{"rollout.max_staleness": 1})
    use = ServedAdapters(names=adapter_names(made, "run"), past_versions=made.past_versions)
    assert use.in_use(3).past == {"policy": [0, 2]}
    with use.held(3):
        assert use.in_use(20).versions == [3]
        assert use.in_use(20).past == {"policy": [2, 14, 16, 18, 20]}
    assert use.in_use(20).past == {"policy": [14, 16, 18, 20]}


def test_engine_has_room_for_every_adapter_version() -> None:
    roles = {"solver": {"adapter": "a"}, "proposer": {"adapter": "b"}, "old": {"adapter": "a", "past": PAST}}
    for questions, expected in ((0, 5 * 2 + 3), (4, 6 * 2 + 3 + 1)):
        changes = {"rollout.max_staleness": 3, "eval.questions": questions}
        assert resident_adapters(config(roles, **changes)) == expected
