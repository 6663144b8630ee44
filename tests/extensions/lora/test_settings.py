"""Roles with adapters of their own, as they are configured: which adapters there are, and which past versions."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import lookup
from asyncrl.checkpoints.manifest import FORMAT, Manifest
from asyncrl.config import Config, load, streams
from asyncrl.config.roles import PastConfig
from asyncrl.errors import ConfigError
from asyncrl.extensions.lora import roles
from asyncrl.extensions.lora.bases import bases
from asyncrl.extensions.lora.choice import choose_lora
from asyncrl.extensions.lora.resuming import check_adapters
from asyncrl.extensions.lora.rules import past_versions, resident_adapters
from asyncrl.extensions.lora.served import ServedAdapters, adapter_names
from asyncrl.models.families import known_families
from tests.fakes import compose_values, tiny_config

OVERLAP = {"trainer.overlap_grad_reduce": True, "trainer.data_parallel": 2}
PAST = {"every": 2, "keep": 3}


def config(roles: dict[str, dict[str, Any]], **changes: Any) -> Config:
    lora = {"trainer.lora.rank": 4, "weights.lora": "versions"}
    return tiny_config(**{**lora, "agents.roles": roles, **changes})


BASES = """
from asyncrl.extension import Extension
from asyncrl.extensions.lora.bases import OfferedBase


class Own(Extension):
    bases = {"thin": OfferedBase("thin:Own", 0.25)}
"""


def refused(config: Config, model: dict[str, Any]) -> None:
    """Raise the first problem of the extension with a model."""
    for problem in lookup.active(config)["lora"].launch().check_model(config, model, 0):
        raise problem


def test_trained_adapters_are_those_of_the_roles() -> None:
    assert tiny_config().agents.adapters == ("policy",)
    assert roles.adapter_of(tiny_config().agents, "anything") == "policy"
    two = config({"solver": {"adapter": "b"}, "proposer": {"adapter": "a"}, "critic": {"adapter": "b"}})
    assert two.agents.adapters == ("a", "b")
    assert roles.adapter_of(two.agents, "critic") == "b"
    with pytest.raises(ConfigError, match=r"agents.roles.*'judge'.*agents.roles.NAME.adapter"):
        roles.adapter_of(two.agents, "judge")
    against_past = config({"opponent": {"past": PAST}})
    assert against_past.agents.adapters == ("policy",)
    assert roles.adapter_of(against_past.agents, "anything") == "policy"


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
    for name, players in (("a", {"a": {"adapter": "b"}}), ("old", {"old": {"past": PAST}})):
        with pytest.raises(ConfigError, match=rf"agents.roles: got \['{name}'\].*engines serve adapters of"):
            refused(config(players), {"architectures": [family]})
    refused(config({"a": {}}, **{"weights.lora": "merged"}), {"architectures": [family]})


def test_roles_of_one_adapter_without_engines_need_no_lora() -> None:
    assert tiny_config(**{"agents.roles": {"player": {"adapter": "policy"}}}).agents.adapters == ("policy",)


@given(every=st.integers(1, 5), keep=st.integers(1, 5), staleness=st.integers(0, 4), newest=st.integers(0, 60))
def test_engines_keep_what_an_episode_may_have_drawn(every: int, keep: int, staleness: int, newest: int) -> None:
    past = PastConfig(every=every, keep=keep)
    admitted = range(max(0, newest - staleness), newest + 1)
    drawn = {version for at in admitted for version in roles.drawn(past, at)}
    assert all(1 <= len(roles.drawn(past, at)) <= keep and roles.drawn(past, at)[-1] <= at for at in admitted)
    assert drawn == set(roles.needed(past, newest, staleness))
    assert len(drawn - set(admitted)) <= keep


def test_evaluation_keeps_the_past_version_it_began_with() -> None:
    made = config({"opponent": {"past": PAST}}, **{"rollout.max_staleness": 1})
    use = ServedAdapters(names=adapter_names(made, "run"), past_versions=partial(past_versions, made))
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


@pytest.mark.parametrize(
    ("changes", "architecture", "gpus", "way"),
    [
        ({}, "Qwen3ForCausalLM", 0, "merged (on CPUs SGLang computes adapters slowly)"),
        ({}, "Qwen3ForCausalLM", 2, "versions (adapters load without a pause)"),
        ({}, "Qwen2_5_VLForConditionalGeneration", 2, "versions (adapters load without a pause)"),
        ({}, "Qwen3MoeForCausalLM", 2, "merged (engines serve adapters of"),
        ({"trainer.lora.targets": ["q_proj"]}, "Qwen3ForCausalLM", 2, "merged (trainer.lora.targets="),
        ({"engine.urls": ["http://127.0.0.1:1"]}, "Qwen3ForCausalLM", 2, "merged (engine.urls"),
        ({"weights.lora": "versions"}, "Qwen3ForCausalLM", 0, "versions (as configured)"),
        ({"trainer.lora.rank": None}, "Qwen3ForCausalLM", 2, ""),
        ({"agents.roles": {"solver": {"adapter": "b"}}}, "Qwen3ForCausalLM", 0, "versions (roles have adapters"),
    ],
)
def test_auto_takes_the_way_that_engines_can_serve(changes, architecture, gpus, way) -> None:
    if architecture not in known_families():
        pytest.skip("no extension has this family")
    config, why = choose_lora(
        tiny_config(**{"trainer.lora.rank": 4, **changes}), {"architectures": [architecture]}, gpus
    )
    assert why.startswith(way)
    assert config.keeps_versions == way.startswith("versions")


def test_adapters_that_engines_do_not_serve_are_refused() -> None:
    config = tiny_config(**{"trainer.lora.rank": 4, "weights.lora": "versions"})
    with pytest.raises(ConfigError, match=r"weights.lora: got 'versions'. engines serve adapters of .*: set merged"):
        refused(config, {"architectures": ["DeepseekV3ForCausalLM"]})


def test_adapters_as_versions_are_refused_with_an_overlap() -> None:
    overlap = {"weights.overlap": True, "rollout.max_staleness": 2, "rollout.lead": None}
    with pytest.raises(ConfigError, match=r"weights\.lora: .*set merged, or set weights\.overlap=false"):
        tiny_config(**{**overlap, "trainer.lora.rank": 4, "weights.lora": "versions"})


def test_all_weights_are_staged_on_gpus_and_adapters_are_merged() -> None:
    config = tiny_config(
        **{"weights.overlap": True, "rollout.max_staleness": 2, "trainer.lora.rank": 4, "weights.lora": "auto"}
    )
    assert not streams(config.weights, gpu=True)
    resolved, why = choose_lora(config, {"architectures": ["LlamaForCausalLM"]}, gpus=8)
    assert (resolved.weights.lora, why) == ("merged", "merged (weights.overlap publishes full weights)")


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("weights.transport", "distributed", "set auto, tensor or disk"),
        ("trainer.lora.targets", ["q_proj"], "needs q_proj with v_proj|no q_proj without v_proj"),
        ("trainer.lora.targets", ["k_proj", "v_proj"], "no k_proj without q_proj"),
        ("trainer.lora.targets", ["up_proj"], "no up_proj without gate_proj"),
        ("trainer.lora.targets", ["q_a_proj"], "choose among them"),
        ("rollout.max_staleness", 40, "Engines would hold 43 adapters"),
    ],
)
def test_what_does_not_fit_adapters_in_the_engines_is_refused(field: str, value: Any, remedy: str) -> None:
    settings: dict[str, Any] = {"trainer.lora.rank": 4, field: value}
    with pytest.raises(ConfigError) as caught:
        tiny_config(**settings, **{"weights.lora": "versions"})
    assert caught.value.field == field
    assert re.search(remedy, caught.value.remedy)
    tiny_config(**settings, **{"weights.lora": "merged"})


def test_adapters_of_fused_layers_are_refused() -> None:
    phi = {"architectures": ["Phi3ForCausalLM"]}
    refused(tiny_config(), phi)
    with pytest.raises(ConfigError, match="fused layers") as caught:
        refused(tiny_config(**{"trainer.lora.rank": 4, "trainer.lora.alpha": 4}), phi)
    assert caught.value.field == "trainer.lora.rank"


def test_grouped_experts_have_no_adapters() -> None:
    lora = {"trainer.lora.rank": 4}
    grouped = {"trainer.recompute.granularity": "selective", "trainer.recompute.modules": ["moe_act"]}
    with pytest.raises(ConfigError, match=r"without trainer\.lora"):
        refused(tiny_config(**lora, **grouped), {"architectures": ["Qwen3MoeForCausalLM"]})


def resumed(then: Config, **changes: Any) -> None:
    """Check that a run with these changes can resume a checkpoint of other settings."""
    check_adapters(tiny_config(**changes), Manifest(FORMAT, 4, "run", 0.0, json.loads(then.model_dump_json()), {}))


def test_adapters_of_a_checkpoint_are_those_of_the_settings() -> None:
    full, adapted = tiny_config(), tiny_config(**{"trainer.lora.rank": 8})
    resumed(full, **{"trainer.lora.alpha": 3})  # unused
    resumed(adapted, **{"trainer.lora.rank": 8, "trainer.lora.dropout": 0.1})
    for field, value, then in (("rank", 8, full), ("rank", 4, adapted), ("rank", None, adapted)):
        with pytest.raises(ConfigError, match=rf"trainer\.lora\.{field}: got {value}\. .*resume with that value"):
            resumed(then, **{f"trainer.lora.{field}": value})
    for name, other in (("alpha", 3), ("rslora", True), ("targets", ["q_proj"])):
        with pytest.raises(ConfigError, match=rf"trainer\.lora\.{name}: got"):
            resumed(adapted, **{"trainer.lora.rank": 8, f"trainer.lora.{name}": other})
    for players in ({"solver": {"adapter": "b"}}, {"old": {"past": {"every": 2, "keep": 1}}}):
        with pytest.raises(ConfigError, match=r"agents.roles: got .* The checkpoint holds policy: resume with"):
            resumed(adapted, **{"trainer.lora.rank": 8, "agents.roles": players})
    resumed(adapted, **{"trainer.lora.rank": 8, "agents.roles": {"solver": {}}})


def test_engines_serve_adapters_only_where_versions_are_adapters() -> None:
    settings = {"trainer.lora.rank": 8, "trainer.lora.targets": ["q_proj", "v_proj"], "rollout.max_staleness": 3}

    def arguments(way: str, *, gpu: bool = False, **changes: Any) -> dict[str, Any]:
        return lookup.engine_arguments(tiny_config(**changes, **{"weights.lora": way}), gpu=gpu)

    found = arguments("versions", **settings)
    assert found["max_lora_rank"] == 8
    assert found["max_loras_per_batch"] == 7  # 4 in use, the next one, an evaluation's, the base
    assert found["lora_backend"] == "torch_native"
    assert found["lora_target_modules"] == ["q_proj", "v_proj"]
    assert arguments("versions", gpu=True, **settings)["lora_backend"] is None
    assert "enable_lora" not in arguments("merged", **settings)
    assert "enable_lora" not in arguments("versions")


def test_base_of_an_extension_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"trainer.lora.rank": 4, "trainer.lora.base": "thin"}
    with pytest.raises(ConfigError, match="Must be one of none") as refused:
        tiny_config(**changes)
    assert refused.value.field == "trainer.lora.base"
    (tmp_path / "thin.py").write_text(BASES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(lookup, "installed", lambda: {"thin": "thin:Own"})
    config = tiny_config(**changes)
    assert config.changes_base
    assert bases()["thin"].bytes == 0.25


def test_experiments_give_players_adapters_or_past_versions() -> None:
    two = load(compose_values("experiment=self_play_adapters"))
    assert two.agents.adapters == ("first", "second")
    assert [roles.adapter_of(two.agents, role) for role in ("player-0", "player-1")] == ["first", "second"]
    past = load(compose_values("experiment=self_play_past"))
    assert past.agents.adapters == ("policy",)
    assert past.agents.roles["player-1"].past
    assert past_versions(past, 35) == {"policy": [0, 10, 20, 30]}
