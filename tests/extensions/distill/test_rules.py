"""A teacher that cannot score the policy's episodes is refused, with field, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import load, under_new_names
from asyncrl.errors import ConfigError
from asyncrl.extensions.distill.extension import DistillHooks
from asyncrl.extensions.distill.tokens import check_teacher
from asyncrl.launch.checks.machines import check_devices
from asyncrl.launch.checks.model import check_model
from tests.fakes import compose_values, tiny_config

HF = {"vocab_size": 8, "max_position_embeddings": 64, "num_attention_heads": 4}
VOCABULARY = {"a": 0, "b": 1, "c": 2}
SPECIAL = [{"id": 3, "content": "<eos>", "special": True}]


def folder(at: Path, *, vocabulary: Any = VOCABULARY, added: Any = SPECIAL, **hf: Any) -> Path:
    at.mkdir()
    (at / "config.json").write_text(json.dumps(HF | hf))
    if vocabulary is not None:
        (at / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": added}))
    return at


def refused(tmp_path: Path, changes: dict[str, Any] | None = None, **teacher: Any) -> ConfigError:
    config = tiny_config(**{"teacher.model": "the/teacher", **(changes or {})})
    with pytest.raises(ConfigError) as caught:
        check_teacher(config, folder(tmp_path / "model"), folder(tmp_path / "teacher", **teacher))
    return caught.value


def passes(tmp_path: Path, changes: dict[str, Any] | None = None, **teacher: Any) -> None:
    config = tiny_config(**{"teacher.model": "the/teacher", **(changes or {})})
    check_teacher(config, folder(tmp_path / "model"), folder(tmp_path / "teacher", **teacher))


@pytest.mark.parametrize(
    ("teacher", "remedy"),
    [
        ({"vocabulary": {"a": 0, "b": 2, "c": 1}}, r"2 token ids differ \(1 is 'b' and 'c'; 2 is 'c' and 'b'\)"),
        ({"added": [{"id": 4, "content": "<eos>"}]}, r"2 token ids differ \(3 is '<eos>' and None; 4 is None"),
        ({"vocabulary": None}, "has no tokenizer.json"),
        ({"vocab_size": 7}, r"vocabulary \(vocab_size 7\) must not be smaller than the model's \(8\)"),
        ({"max_position_embeddings": 32}, r"context \(max_position_embeddings 32\).*engine.server_args.context_length"),
    ],
)
def test_teacher_of_other_vocabulary_or_context_is_refused(
    teacher: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    error = refused(tmp_path, **teacher)
    assert (error.field, error.value) == ("teacher.model", "the/teacher")
    with pytest.raises(ConfigError, match=remedy):
        raise error


def test_teacher_with_a_padded_vocabulary_passes(tmp_path: Path) -> None:
    passes(tmp_path, vocab_size=16, max_position_embeddings=128)


def test_vocabulary_of_a_unigram_model_is_a_list(tmp_path: Path) -> None:
    passes(tmp_path, vocabulary=[["a", 0.0], ["b", -1.0], ["c", -2.0]])


def test_contexts_are_those_that_the_engines_are_given(tmp_path: Path) -> None:
    short = {"engine.server_args": {"context_length": 32}}
    passes(tmp_path, short, max_position_embeddings=32)


def test_contexts_of_the_teachers_engines_count_too(tmp_path: Path) -> None:
    assert refused(tmp_path, {"teacher.server_args": {"context_length": 32}}).field == "teacher.model"


def test_language_model_inside_another_is_found(tmp_path: Path) -> None:
    error = refused(tmp_path, text_config={"vocab_size": 4})
    assert "vocab_size 4" in str(error)


def test_heads_must_divide_where_engines_are_started(tmp_path: Path) -> None:
    error = refused(tmp_path, {"teacher.tensor_parallel": 3})
    assert (error.field, error.value) == ("teacher.tensor_parallel", 3)


def test_engines_elsewhere_have_a_layout_of_their_own(tmp_path: Path) -> None:
    passes(tmp_path, {"teacher.tensor_parallel": 3, "teacher.urls": ["http://gpu1:30000"]})


def test_wrong_teacher_is_refused_once_both_models_are_known(tmp_path: Path) -> None:
    folders = {"model": folder(tmp_path / "model"), "teacher": folder(tmp_path / "teacher", vocab_size=7)}

    def prepared(*roles: str) -> Any:
        config = tiny_config(**{"teacher.model": "the/teacher"})
        return SimpleNamespace(config=config, hf=dict.fromkeys(roles), folders=folders)

    with pytest.raises(ConfigError, match="must not be smaller") as found:
        DistillHooks().refuse(prepared("model", "teacher"))
    assert found.value.field == "teacher.model"
    DistillHooks().refuse(prepared("model"))


def test_teacher_of_a_model_that_sees_is_refused() -> None:
    pytest.importorskip("asyncrl.extensions.vision")
    text = {**HF, "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "num_hidden_layers": 4}
    seeing = {**text, "architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"patch_size": 16}}
    config = tiny_config(**{"teacher.model": "/teacher"})
    check_model(config, text)
    with pytest.raises(ConfigError, match="Teachers score text only") as caught:
        check_model(config, seeing)
    assert caught.value.field == "teacher.model"


# --- settings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field", "value", "remedy"),
    [
        (
            {"distill.coefficient": 1.0},
            "distill.coefficient",
            1.0,
            "set teacher=sglang teacher.model",
        ),
        ({"algo.kl.reference": "teacher"}, "algo.kl.reference", "teacher", "set teacher=sglang teacher.model"),
        ({"teacher.urls": ["http://a:1"]}, "teacher.urls", ["http://a:1"], "set teacher=sglang teacher.model"),
        ({"teacher.model": "/t", "teacher.urls": ["gpu1:30000"]}, "teacher.urls", "gpu1:30000", "http://HOST:PORT"),
        (
            {"teacher.model": "/t", "rollout.temperature": 0.7, "distill.discount": 0.5},
            "rollout.temperature",
            0.7,
            "distill.discount would be wrong",
        ),
        (
            {"teacher.model": "/t", "rollout.temperature": 0.7, "algo.kl.reference": "teacher"},
            "rollout.temperature",
            0.7,
            "algo.kl.reference=teacher would be wrong",
        ),
        ({"algo.advantage": "none"}, "algo.advantage", "none", "own signal, as distillation"),
        (
            {"teacher.model": "/t", "algo.kl.reference": "teacher", "algo.kl.reference_path": "/r"},
            "algo.kl.reference_path",
            "/r",
            "leave it unset",
        ),
        (
            {"teacher.model": "/t", "distill.place": "loss", "distill.discount": 0.5},
            "distill.discount",
            0.5,
            "set 0",
        ),
        (
            {
                "teacher.model": "/t",
                "algo.advantage": "none",
                "distill.coefficient": 1.0,
                "algo.kl.coefficient": 0.1,
                "algo.kl.place": "reward",
            },
            "algo.kl.place",
            "reward",
            "set loss",
        ),
    ],
)
def test_setting_that_needs_a_teacher_or_contradicts_it_is_named(
    changes: dict[str, Any], field: str, value: Any, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        tiny_config(**changes)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_other_temperatures_pass_where_tokens_stand_alone() -> None:
    tiny_config(**{"teacher.model": "/t", "rollout.temperature": 0.7, "distill.coefficient": 1.0})


def test_pure_distillation_needs_no_siblings() -> None:
    changes = {"teacher.model": "/t", "distill.coefficient": 1.0, "rollout.group_size": 1}
    assert tiny_config(**changes, **{"algo.advantage": "none"}).rollout.group_size == 1
    with pytest.raises(ConfigError, match="compares siblings"):
        tiny_config(**changes)


def test_unset_teacher_is_the_model_training_starts_from() -> None:
    values = compose_values("experiment=tiny", "teacher=sglang", "algo.kl.reference=teacher", "algo.kl.coefficient=0.1")
    assert load(values).teacher.model == "builtin:tiny"
    assert load(compose_values("experiment=tiny")).teacher.started == 0


def test_option_of_the_group_sets_a_coefficient() -> None:
    values = compose_values("experiment=tiny", "teacher=distill", "teacher.model=/t", "distill.discount=0.5")
    config: Any = load(values)
    assert (config.teacher.model, config.teacher.count) == ("/t", 1)
    assert (config.distill.coefficient, config.distill.discount) == (1.0, 0.5)


def test_section_of_an_earlier_run_has_its_new_name() -> None:
    before = {"algo": {"epochs": 1, "distillation": {"coefficient": 0.5, "discount": 0.0}}}
    assert under_new_names(before) == {"algo": {"epochs": 1}, "distill": {"coefficient": 0.5, "discount": 0.0}}
    assert "distillation" in before["algo"]  # it is left as it is


def test_gpus_of_a_teacher_are_counted() -> None:
    config = tiny_config(**{"teacher.model": "/t", "teacher.count": 2, "teacher.tensor_parallel": 2})
    with pytest.raises(ConfigError, match=r"got 6.*teacher.count × teacher.tensor_parallel"):
        check_devices(config, gpus=5)
    check_devices(config, gpus=6)
    check_devices(tiny_config(**{"teacher.count": 8, "teacher.device": "cuda"}), gpus=0)  # none is started
