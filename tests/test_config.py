"""Every shipped configuration is valid, every wrong setting is named with its value and its remedy."""

from __future__ import annotations

import ast
import importlib
import json
import math
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from omegaconf.errors import MissingMandatoryValue
from pydantic import ValidationError

from asyncrl import config as module
from asyncrl.algo.loss import LOSSES
from asyncrl.config import load, read, under_new_names
from asyncrl.errors import CompositionError, ConfigError
from asyncrl.launch.checks.machines import check_devices
from asyncrl.launch.checks.model import check_model
from asyncrl.launch.compose import compose
from asyncrl.launch.help import docstrings
from asyncrl.launch.main import CONF
from asyncrl.removed import LAST, MOVED_SETTINGS, REMOVED
from asyncrl.settings import Choice, Section
from tests.fakes import ALONE, GIVEN, JOB, LLAMA, MOE, OPTIONS, compose_values, missing, tiny_config, tiny_values
from tests.models.published import FP8

EXPERIMENTS = sorted(name for group, name in OPTIONS if group == "experiment")
TASKS = sorted(
    name
    for (group, name), file in OPTIONS.items()
    if group == "task" and name not in ("base", "file", "own") and "kind: benchmark" not in file.read_text()
)
GROUPED = {"layers": "transformer_engine"}
DEEPSEEK = {
    **MOE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 6,
    "n_shared_experts": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4),
}


def refusal(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        tiny_config(**changes)
    return caught.value


def test_stop_strings_and_template_variables_have_settings() -> None:
    config = tiny_config(**{"rollout.stop": ["\n\n"], "model.chat_template_kwargs": {"enable_thinking": False}})
    assert config.rollout.stop == ["\n\n"]
    with pytest.raises(ConfigError, match=r"rollout\.stop"):
        tiny_config(**{"rollout.stop": ["x", ""]})
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs\.tools"):
        tiny_config(**{"model.chat_template_kwargs": {"tools": []}})


def test_what_cannot_be_repeated_is_not_called_deterministic() -> None:
    assert refusal(deterministic=True).field == "rollout.max_staleness"
    tiny_config(deterministic=True, **{"rollout.max_staleness": 0})
    tiny_config(deterministic=True, **GIVEN)  # batches are given


def test_only_what_trains_has_checkpoints() -> None:
    assert refusal(**ALONE, **{"checkpoint.every": 2}).field == "checkpoint.every"
    tiny_config(resume="auto", **GIVEN, **{"checkpoint.every": 2})


# --- what is shipped ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes_and_is_valid(name: str) -> None:
    config = load(compose_values(f"experiment={name}", *missing(name)))
    assert config.run.name == name


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if missing(name)])
def test_users_model_takes_no_others_place_in_an_experiment(name: str) -> None:
    with pytest.raises(MissingMandatoryValue, match=r"model\.path"):
        compose_values(f"experiment={name}")
    with pytest.raises(ConfigError, match=r"task\.train_file: got None"):
        load(compose_values(f"experiment={name}", "model.path=/models/m"))


@pytest.mark.parametrize("name", TASKS)
def test_task_composes_and_is_valid(name: str) -> None:
    load(compose_values(f"task={name}"))


def test_every_option_of_every_group_is_in_some_composition() -> None:
    options = OPTIONS.keys() - {("experiment", name) for name in EXPERIMENTS}
    extra = {
        ("task", "file"): ["task.train_file=/rows.jsonl"],
        ("task", "own"): ["task.kind=my_module:Mine"],
        ("model", "folder"): ["model.path=/models/m"],
    }
    sets = {option for option in options if "kind: benchmark" in OPTIONS[option].read_text()}
    done = {("task", "base"), *(("task", name) for name in TASKS)}  # the base lacks a kind and a name
    for group, option in sorted(options - done - sets):
        load(compose_values(f"{group}={option}", *extra.get((group, option), [])))
    for _, option in sorted(sets):
        load(compose_values(f"+task@eval.sets.{option}={option}"))


def test_command_without_arguments_is_the_default_experiment() -> None:
    assert compose_values("run.dir=r") == compose_values("run.dir=r", "experiment=default")


def test_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = tiny_config(**{"rollout.lead": 1, "task.params": {"digits": 2}, "trainer.optimizer.lr": 1e-7})
    (tmp_path / "config.json").write_text(config.model_dump_json(indent=2))
    assert read(tmp_path) == config


@pytest.mark.parametrize("field", ["algo.correction.cap", "trainer.bad_grad_norm", "algo.loss.clip_high"])
def test_infinity_is_refused_or_reads_back(field: str, tmp_path: Path) -> None:
    try:
        config = tiny_config(**{field: math.inf})
    except ConfigError:
        return  # as good
    (tmp_path / "config.json").write_text(config.model_dump_json(indent=2))
    assert read(tmp_path) == config


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("rollout.max_stalenes", 3, "No such field: check the spelling"),
        ("trainer.optimizer.learning_rate", 1e-3, "No such field: check the spelling"),
        ("rollout.batch_groups", "8", "valid integer"),
        ("rollout.batch_groups", 0, "greater than or equal to 1"),
        ("rollout.batch_groups", 2.5, "valid integer"),
        ("rollout.max_staleness", -1, "greater than or equal to 0"),
        ("rollout.temperature", 0.0, "greater than 0"),
        ("algo.loss.clip_low", 1.5, "less than or equal to 1"),
        ("algo.loss", "decoupled_ppo", "ppo, gspo"),
        ("algo.advantage", "vtrace", "grpo, dr_grpo"),
        ("algo.correction", "mis", "tis, tis_sequence, icepop"),
        ("algo.loss.dual_clip", 1.0, "greater than 1"),
        ("algo.mask.lag", -1, "greater than or equal to 0"),
        ("algo.shaping.clip", 0.0, "greater than 0"),
        ("algo.shaping.overlong_buffer", 4, r"Must not exceed rollout.max_new_tokens \(3\)"),
        ("algo.mask.sequence", (2.0, 0.5), "The interval is empty"),
        ("algo.mask.geometric", (1.5, 0.5), "The interval is empty"),
        ("algo.correction.floor", 2.5, r"Must not exceed algo.correction.cap \(2.0\)"),
        ("trainer.dtype", "float16", "'bfloat16' or 'float32'"),
        ("run.overwrite", "yes", "valid boolean"),
        ("run.dir", "", "Must be a name without line breaks"),
        ("run.dir", "runs/a\nb", "Must be a name without line breaks"),
        ("run.name", "a\x1b[2J", "Must be a name without line breaks"),
        ("cluster.host", "0.0.0.0", "Must be one address"),
        ("cluster.host", "::", "Must be one address"),
        ("cluster.host", "", "Must be one address"),
        ("rollout.batch_groups", 10**9, "less than or equal to 1000000"),
        ("rollout.overlong_prompts", "cut", "'skip' or 'refuse'"),
        ("run.max_steps", True, "valid integer"),
        ("engine.server_args", ["--x"], "valid dictionary"),
        ("rollout.lead", 3, r"Must not exceed rollout.max_staleness \(2\)"),
        ("trainer.sequence_parallel", True, "Needs trainer.tensor_parallel of 2"),
        ("trainer.virtual_pipeline", 2, "Needs pipeline_parallel of 2"),
        ("trainer.expert_parallel", 2, r"\(2\) must divide the 1 ranks of a pipeline stage"),
        ("trainer.expert_tensor_parallel", 3, r"\(3\) must divide the 1 ranks of a pipeline stage"),
        ("trainer.optimizer.min_lr", 1.0, r"Must not exceed trainer.optimizer.lr \(0.001\)"),
        (
            "rollout.group_size",
            1,
            "algo.advantage=grpo compares siblings: set 2 or more, or algo.advantage to one of none, ",
        ),
    ],
)
def test_wrong_setting_names_field_value_and_remedy(field: str, value: Any, remedy: str) -> None:
    error = refusal(**{field: value})
    assert (error.field, error.value) == (field, value)
    assert str(error).startswith(f"{field}: got {value!r}. ")
    with pytest.raises(ConfigError, match=remedy):
        raise error


@pytest.mark.parametrize("advantage", ["none", "gae", "reinforce_pp"])
def test_lone_episodes_need_advantages_without_siblings(advantage: str) -> None:
    more = {"teacher.model": "x", "distill.coefficient": 1.0} if advantage == "none" else {}
    tiny_config(**{"rollout.group_size": 1, "algo.advantage": advantage, **more})


def test_experts_take_no_more_ranks_than_a_pipeline_stage_has() -> None:
    layout = {"trainer.tensor_parallel": 2, "trainer.data_parallel": 2}
    assert tiny_config(**layout, **{"trainer.expert_parallel": 2}).trainer.world_size == 4  # matrices shared by 2, too
    assert refusal(**layout, **{"trainer.expert_parallel": 4}).field == "trainer.expert_parallel"
    tiny_config(**layout, **{"trainer.expert_parallel": 4, "trainer.expert_tensor_parallel": 1})
    both = {"trainer.expert_parallel": 2, "trainer.expert_tensor_parallel": 4}
    assert refusal(**layout, **both).field == "trainer.expert_parallel"
    only_pipeline = {"trainer.pipeline_parallel": 2, "trainer.expert_parallel": 2}
    assert refusal(**only_pipeline).field == "trainer.expert_parallel"


def test_warm_up_beyond_the_decay_is_refused() -> None:
    changes = {"trainer.optimizer.schedule": "cosine", "trainer.optimizer.warmup_steps": 600}
    assert refusal(**changes).field == "trainer.optimizer.warmup_steps"
    changes["trainer.optimizer.decay_steps"] = 601
    tiny_config(**changes)


def test_file_task_without_a_file_is_refused() -> None:
    assert refusal(**{"task.kind": "file"}).field == "task.train_file"


# --- the algorithm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_loss_that_weighs_the_gap_itself_takes_no_correction(name: str) -> None:
    settings = {"algo.loss": name, "algo.aggregation": "sequence"}
    if LOSSES.find(Choice(name=name)).traits.corrects:
        error = refusal(**settings)
        assert (error.field, error.value) == ("algo.correction", "tis")
        assert f"algo.loss={name} already weights this gap" in error.remedy
    else:
        tiny_config(**settings)
    tiny_config(**settings, **{"algo.correction": None})


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_sequences_takes_the_mean_of_sequences(name: str) -> None:
    settings = {"algo.loss": name, "algo.aggregation": "token", "algo.correction": None}
    if LOSSES.find(Choice(name=name)).traits.per_sequence:
        assert refusal(**settings).field == "algo.aggregation"
    else:
        tiny_config(**settings)


def test_engine_as_proximal_policy_leaves_nothing_to_correct() -> None:
    engine = {"algo.proximal": "behaviour", "algo.correction": None}
    tiny_config(**engine, **{"algo.mask.opsm": 0.1, "algo.mask.lag": 2})
    assert refusal(**engine | {"algo.correction": "tis"}).field == "algo.correction"
    for mask in ("mask.sequence", "mask.geometric"):
        assert refusal(**engine, **{f"algo.{mask}": [0.5, 2.0]}).field == f"algo.{mask}"


def test_bounds_are_lists_of_two_in_yaml_and_json(tmp_path: Path) -> None:
    config = load(compose_values("algo.mask.geometric=[0.999,1.001]", "algo.mask.sequence=[0,2]"))
    assert (config.algo.mask.geometric, config.algo.mask.sequence) == ((0.999, 1.001), (0.0, 2.0))
    (tmp_path / "config.json").write_text(config.model_dump_json())
    assert read(tmp_path) == config


# --- several tasks ------------------------------------------------------------------------------------------


def test_tasks_are_composed_by_name_with_weights_and_sizes() -> None:
    config = load(
        compose_values(
            "experiment=tiny",
            "+task@tasks.sort=word_sorting",
            "+task@tasks.sum=chain_sum",
            "tasks.sum.weight=3",
            "tasks.sum.group_size=4",
            "+task@eval.sets.hard=chain_sum",
            "eval.sets.hard.params.max_digits=2",
        )
    )
    assert {name: (task.name, task.weight) for name, task in config.mixture.items()} == {
        "sort": ("word_sorting", 1.0),
        "sum": ("chain_sum", 3.0),
    }
    assert (config.group_size("sort"), config.group_size("sum")) == (16, 4)
    assert list(config.eval_sets) == ["sort", "sum", "hard"]
    assert config.eval_sets["hard"].params["max_digits"] == 2
    assert config.mixture["sum"].params["max_digits"] == 1


def test_single_task_is_a_mixture_of_one() -> None:
    config = tiny_config(**{"task.group_size": 3})
    assert config.mixture == config.eval_sets == {"copy3": config.task}
    assert config.group_size("copy3") == 3
    assert tiny_config(**{"eval.questions": 0}).eval_sets == {}


@pytest.mark.parametrize(
    ("changes", "field", "value", "remedy"),
    [
        ({"tasks": {"sum": {"weight": 0.0}}}, "tasks.sum.weight", 0.0, "greater than 0"),
        ({"tasks": {"sum": {"group_size": 1}}}, "tasks.sum.group_size", 1, "compares siblings: set 2 or more"),
        ({"task.group_size": 1}, "task.group_size", 1, "compares siblings: set 2 or more"),
        ({"tasks": {"a": {}, "b": {"kind": "file"}}}, "tasks.b.train_file", None, "needs the path"),
        ({"tasks": {"a/b": {}}}, "tasks.a/b.[key]", "a/b", "should match pattern"),
        ({"eval.sets": {"hard": {"kind": "file"}}}, "eval.sets.hard.train_file", None, "needs the path"),
        ({"eval.sets": {"copy3": {}}}, "eval.sets", "copy3", "choose another name"),
        ({"eval.sets": {"hard": {}}, "eval.questions": 0}, "eval.questions", 0, r"\['hard'\] would get no questions"),
        ({"eval.samples": -1}, "eval.samples", -1, "greater than or equal to 0"),
        ({"eval.max_running": 0}, "eval.max_running", 0, "greater than or equal to 1"),
    ],
)
def test_wrong_setting_of_one_of_several_tasks_is_named(
    changes: dict[str, Any], field: str, value: Any, remedy: str
) -> None:
    task = tiny_values()["task"]
    for name in changes.keys() & {"tasks", "eval.sets"}:
        changes = changes | {name: {key: task | one for key, one in changes[name].items()}}
    error = refusal(**changes)
    assert (error.field, error.value) == (field, value)
    with pytest.raises(ConfigError, match=remedy):
        raise error


def test_set_of_a_file_needs_no_training_questions() -> None:
    rows = {**tiny_values()["task"], "kind": "file", "eval_file": "/rows.jsonl"}
    assert "hard" in tiny_config(**{"eval.sets": {"hard": rows}}).eval_sets


def test_missing_field_is_named() -> None:
    values = tiny_values()
    del values["agent"]
    with pytest.raises(ConfigError, match=r"agent: got None. This field has no value"):
        load(values)


def test_several_wrong_settings_are_all_named() -> None:
    error = refusal(**{"rollout.batch_groups": 0, "algo.loss": "x", "engine.cuont": 1})
    for field, value in (("rollout.batch_groups", 0), ("algo.loss", "x"), ("engine.cuont", 1)):
        assert f"{field}: got {value!r}. " in str(error)


def test_first_of_several_problems_keeps_its_whole_text() -> None:
    error = refusal(**{"run.name": ["v. 1"], "algo.loss": "x"})
    assert str(error).splitlines()[0] == str(refusal(**{"run.name": ["v. 1"]}))


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"overlap_grad_reduce": True}, "overlap_grad_reduce", "no replicas"),
        ({"overlap_param_gather": True, "data_parallel": 2}, "overlap_param_gather", "overlap_grad_reduce=true"),
        ({"pipeline_split.first_stage_layers": 1}, "pipeline_split", "pipeline_parallel of 2"),
        (
            {"pipeline_split.first_stage_layers": 1, "pipeline_split.account_for_loss": True, "pipeline_parallel": 2},
            "pipeline_split",
            "not both",
        ),
        (
            {"recompute.granularity": "selective", "recompute.modules": []},
            "recompute.modules",
            "Name a module",
        ),
    ],
)
def test_unfit_megatron_settings_are_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    error = refusal(**{f"trainer.{name}": value for name, value in changes.items()})
    assert error.field == f"trainer.{field}"
    assert remedy in str(error)


def test_base_is_quantized_only_under_adapters() -> None:
    found = refusal(**{"trainer.lora.base": "nf4"})
    assert (found.field, found.value) == ("trainer.lora.base", "nf4")


# --- what the model and the machine rule out ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("trainer.tensor_parallel", 4, r"Must divide the model's 6 attention heads: one of \[1, 2\]"),
        ("trainer.tensor_parallel", 3, r"Must divide the model's 2 key-value heads: one of \[1, 2\]"),
        ("engine.tensor_parallel", 3, r"Must divide the model's 2 key-value heads: one of \[1, 2, 6\]"),
        ("engine.tensor_parallel", 4, r"Must divide the model's 6 attention heads: one of \[1, 2, 6\]"),
        ("trainer.pipeline_parallel", 3, "The model has 4 layers, and 3 stages cannot share 4 layers evenly"),
        ("rollout.max_new_tokens", 64, "Must leave room for a prompt within the model's 64 positions"),
    ],
)
def test_impossible_layout_names_field_value_and_remedy(field: str, value: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check_model(tiny_config(**{field: value}), LLAMA)
    assert (caught.value.field, caught.value.value) == (field, value)


def test_experts_with_biases_are_not_divided() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    hf = {**LLAMA, "architectures": ["GptOssForCausalLM"], **experts, "sliding_window": 8, "layer_types": kinds}
    check_model(tiny_config(), hf)
    with pytest.raises(ConfigError, match=r"trainer\.layers: got 'auto'.*set local"):
        check_model(tiny_config(), hf, gpus=8)
    with pytest.raises(ConfigError, match=r"set trainer\.expert_tensor_parallel=1"):
        check_model(tiny_config(**{"trainer.tensor_parallel": 2, "trainer.sequence_parallel": True}), hf)


@pytest.mark.parametrize(
    ("hf", "field", "value", "others", "remedy"),
    [
        (LLAMA, "virtual_pipeline", 4, {"pipeline_parallel": 2}, "4 chunks cannot share the 2 layers of a stage"),
        (LLAMA, "tensor_parallel", 2, {"intermediate_size": 9}, "the 9 features of an MLP evenly"),
        (LLAMA, "expert_parallel", 2, {"data_parallel": 2}, "no routed experts: set it to 1"),
        (LLAMA, "expert_tensor_parallel", 1, {}, "no routed experts: set it to None"),
        (MOE, "expert_parallel", 4, {"data_parallel": 4}, "Must divide the model's 6 routed experts"),
        (MOE, "expert_tensor_parallel", 3, {"data_parallel": 3}, "3 ranks cannot share the 4 features of a routed"),
        (DEEPSEEK, "tensor_parallel", 2, {"moe_intermediate_size": 3}, "the 9 features of the shared experts"),
        (MOE, "sequence_parallel", False, {"tensor_parallel": 2}, "set it to true"),
    ],
)
def test_impossible_layout_of_layers_is_refused(
    hf: dict[str, Any], field: str, value: Any, others: dict[str, int], remedy: str
) -> None:
    changes = {f"trainer.{name}": number for name, number in {field: value, **others}.items() if name not in hf}
    hf = {**hf, **{name: number for name, number in others.items() if name in hf}}
    with pytest.raises(ConfigError, match=remedy) as caught:
        check_model(tiny_config(**changes), hf)
    assert (caught.value.field, caught.value.value) == (f"trainer.{field}", value)


@pytest.mark.parametrize(
    ("hf", "changes", "why"),
    [
        (LLAMA, {}, "no routed experts"),
        (MOE, {}, "One rank holds all experts"),
        (MOE, {"trainer.data_parallel": 2, "trainer.expert_parallel": 2, "trainer.device": "cpu"}, "for GPUs"),
        (MOE, {"trainer.data_parallel": 2, "trainer.expert_parallel": 2, "trainer.device": "auto"}, "deep_ep"),
    ],
)
def test_dispatcher_without_kernels_or_experts_is_refused(
    hf: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        check_model(tiny_config(**{"trainer.token_dispatcher": "deepep", **changes}), hf)
    assert (caught.value.field, caught.value.value) == ("trainer.token_dispatcher", "deepep")


@pytest.mark.parametrize(
    ("hf", "changes", "field", "remedy"),
    [
        (LLAMA, {"pipeline_split.first_stage_layers": 5}, "pipeline_parallel", "1 stages cannot share -1 layers"),
        (
            LLAMA,
            {"pipeline_split.first_stage_layers": 1, "pipeline_split.last_stage_layers": 1},
            "pipeline_split",
            "not the model's 4 layers",
        ),
        (LLAMA, {"pipeline_split.account_for_loss": True}, "pipeline_parallel", "2 stages cannot share 5 layers"),
        (
            LLAMA,
            {"recompute.granularity": "full", "recompute.num_layers": 2, "pipeline_split.first_stage_layers": 3},
            "recompute.num_layers",
            "Must divide the 3 layers of a pipeline stage's chunk",
        ),
        (
            LLAMA,
            {"recompute.granularity": "selective", "recompute.modules": ["mlp", "moe"]},
            "recompute.modules",
            "no such module",
        ),
        (
            MOE,
            {"recompute.granularity": "selective", "recompute.modules": ["mla_up_proj"]},
            "recompute.modules",
            "no such module",
        ),
    ],
)
def test_impossible_recomputation_and_stages_are_refused(
    hf: dict[str, Any], changes: dict[str, Any], field: str, remedy: str
) -> None:
    settings = {"trainer.pipeline_parallel": 2, **{f"trainer.{name}": value for name, value in changes.items()}}
    with pytest.raises(ConfigError, match=remedy) as caught:
        check_model(tiny_config(**settings), hf)
    assert caught.value.field == f"trainer.{field}"


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            r"got 'MambaForCausalLM'. Supported architectures: .*'LlamaForCausalLM'",
        ),
        ({"architectures": ["InternVLChatModel"]}, "images beside texts, not beside token ids.* Supported archit"),
        ({"architectures": ["InternVLForConditionalGeneration"]}, "rounds their pixels to bfloat16"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "attend to each other in both directions"),
        ({"attention_bias": True}, "biases are not supported"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "Supported rotary embeddings: default"),
    ],
)
def test_model_that_the_trainer_cannot_build_is_refused(change: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        check_model(tiny_config(), {**LLAMA, **change})
    assert caught.value.field == "model.path"


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("moe_runner_backend", "flashinfer_trtllm", "cannot load new weights"),
        ("quantization", "fp8", "remove it"),
        ("load-format", "dummy", "random weights"),
        ("moe_a2a_backend", "deepep", "weights.verify=false"),
        ("disable-shared-experts-fusion", True, "weights.verify=false"),
    ],
)
def test_engines_that_cannot_prove_weights_are_refused(name: str, value: Any, remedy: str) -> None:
    args = {"engine.server_args": {name: value}}
    wrong = refusal(**args)
    assert (wrong.field, wrong.value) == (f"engine.server_args.{name.replace('-', '_')}", value)
    assert remedy in str(wrong)
    tiny_config(**args, **ALONE)


def test_an_argument_of_an_engine_has_one_name() -> None:
    assert tiny_config(**{"engine.server_args": {"log-level": "info"}}).engine.server_args == {"log_level": "info"}
    with pytest.raises(ConfigError, match="remove one of the two"):
        tiny_config(**{"engine.server_args": {"log-level": "info", "log_level": "debug"}})


def test_engines_cut_otherwise_pass_unverified() -> None:
    tiny_config(**{"engine.server_args": {"moe_dense_tp_size": 2}, "weights.verify": False})
    tiny_config(**{"engine.server_args": {"moe_dp_size": 1, "moe_a2a_backend": "none", "moe_runner_backend": "triton"}})


REPLICATED = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}


MINISTRAL = {
    **LLAMA,
    "architectures": ["Ministral3ForCausalLM"],
    "max_position_embeddings": 65536,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": 16384,
    },
}
OF_TRANSFORMERS = {**LLAMA, "architectures": ["SeedOssForCausalLM"]}


def test_model_differing_from_some_position_is_refused() -> None:
    with pytest.raises(ConfigError, match="context_length=16384") as caught:
        check_model(tiny_config(), MINISTRAL)
    assert caught.value.field == "engine.server_args.context_length"
    check_model(tiny_config(**{"engine.server_args": {"context_length": 16384}}), MINISTRAL)


def test_olmo3_with_yarn_is_served_as_published_alone() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
    hf = {**LLAMA, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 8, "layer_types": kinds}
    check_model(tiny_config(), {**hf, "rope_theta": 5e5, "rope_scaling": yarn})
    with pytest.raises(ConfigError, match=r"rope_parameters'\..*copy the publisher's config\.json"):
        check_model(tiny_config(), {**hf, "rope_parameters": {**yarn, "rope_theta": 5e5}})


def test_engines_of_weights_in_fp8_are_refused() -> None:
    with pytest.raises(ConfigError, match="asyncrl-convert dequantize"):
        check_model(tiny_config(), {**LLAMA, "quantization_config": FP8}, gpus=8)


def test_gpu_engines_serve_fp8_untrained_and_cpus_do_not() -> None:
    pytest.importorskip("asyncrl.extensions.evaluate")
    hf, elsewhere = {**LLAMA, "quantization_config": FP8}, {"engine.urls": ["http://h:1"]}
    check_model(tiny_config(mode="evaluate"), hf, gpus=8)
    check_model(tiny_config(mode="evaluate", **elsewhere), hf)
    with pytest.raises(ConfigError, match="no engine on a CPU computes with them: asyncrl-convert dequantize"):
        check_model(tiny_config(mode="evaluate"), hf)


def test_without_engines_only_their_position_limit_holds() -> None:
    given = tiny_config(**GIVEN)
    check_model(given, {**LLAMA, "quantization_config": FP8})
    dense = {**MOE, "mlp_only_layers": [0]}
    check_model(given, dense)
    with pytest.raises(ConfigError, match="use another model"):
        check_model(tiny_config(), dense)
    with pytest.raises(ConfigError, match="context_length=16384"):
        check_model(given, MINISTRAL)


@pytest.mark.parametrize(
    ("hf", "shape", "field", "remedy"),
    [
        ({**OF_TRANSFORMERS, "num_key_value_heads": 1}, {"tensor_parallel": 2}, "tensor_parallel", "cannot divide 1"),
        (LLAMA, {"tensor_parallel": 2, "expert_parallel": 2}, "expert_parallel", "no routed experts"),
        ({**MOE, "num_experts": 3}, {"tensor_parallel": 2, "expert_parallel": 2}, "expert_parallel", "3 routed"),
        (REPLICATED, {"tensor_parallel": 8, "data_parallel": 2}, "tensor_parallel", "attention heads"),
    ],
)
def test_engine_shape_that_the_model_lacks_is_refused(
    hf: dict[str, Any], shape: dict[str, int], field: str, remedy: str
) -> None:
    changes = {f"engine.{name}": size for name, size in shape.items()}
    with pytest.raises(ConfigError, match=remedy) as caught:
        check_model(tiny_config(**changes), hf)
    assert caught.value.field == f"engine.{field}"


def test_engines_whose_groups_share_the_experts_pass() -> None:
    check_model(tiny_config(**{"engine.tensor_parallel": 6, "engine.expert_parallel": 3}), MOE)


@pytest.mark.parametrize("field", ["engine.data_parallel", "engine.pipeline_parallel"])
def test_replicas_and_stages_are_refused_without_an_extension(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncrl.launch.checks.model.enabled", set)
    with pytest.raises(ConfigError, match="No extension that is installed lets engines") as caught:
        check_model(tiny_config(**{"engine.tensor_parallel": 2, field: 2, "weights.pause_mode": "drain"}), REPLICATED)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["expert_parallel", "data_parallel"])
def test_the_groups_of_an_engine_divide_its_ranks(field: str) -> None:
    wrong = refusal(**{"engine.tensor_parallel": 4, f"engine.{field}": 3})
    assert (wrong.field, wrong.value) == (f"engine.{field}", 3)
    assert "engine.tensor_parallel=4" in str(wrong)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("tp-size", "tensor_parallel"),
        ("ep_size", "expert_parallel"),
        ("dp_size", "data_parallel"),
        ("pp_size", "pipeline_parallel"),
        ("hicache_size", "hicache"),
    ],
)
def test_arguments_that_are_settings_are_refused(name: str, field: str) -> None:
    wrong = refusal(**{"engine.server_args": {name: 2}})
    assert wrong.field == f"engine.server_args.{name.replace('-', '_')}"
    assert f"engine.{field}" in str(wrong)


def test_layouts_that_fit_the_model_pass() -> None:
    check_model(tiny_config(**{"trainer.tensor_parallel": 2, "trainer.pipeline_parallel": 4}), LLAMA)
    experts = {"trainer.data_parallel": 6, "trainer.expert_parallel": 3, "trainer.expert_tensor_parallel": 2}
    check_model(tiny_config(**experts), MOE)
    check_model(tiny_config(**experts), DEEPSEEK)
    check_model(tiny_config(**{"trainer.pipeline_parallel": 2, "trainer.virtual_pipeline": 2}), LLAMA)
    check_model(tiny_config(), {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"})


def test_more_gpu_ranks_than_gpus_is_refused_with_the_numbers() -> None:
    config = tiny_config(**{"trainer.tensor_parallel": 2, "trainer.data_parallel": 2, "engine.count": 3})
    with pytest.raises(ConfigError, match=r"got 7. The machine has 6 GPUs: lower trainer.tensor_parallel.*\(4 ranks\)"):
        check_devices(config, gpus=6)
    check_devices(config, gpus=7)
    check_devices(config, gpus=0)  # on CPU any number of processes may share the cores


def test_processes_kept_on_the_cpu_need_no_gpu() -> None:
    config = tiny_config(**{"engine.count": 8, "engine.device": "cpu"})
    check_devices(config, gpus=1)


@pytest.mark.parametrize("name", ["trainer", "engine"])
def test_cuda_without_a_gpu_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="This machine has no visible GPU: use cpu or auto") as caught:
        check_devices(tiny_config(**{f"{name}.device": "cuda"}), gpus=0)
    assert caught.value.field == f"{name}.device"


# --- the models themselves ----------------------------------------------------------------------------------


def test_configuration_is_immutable() -> None:
    config = tiny_config()
    for section, field in ((config, "run"), (config.run, "seed"), (config.trainer.optimizer, "lr")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, field, getattr(section, field))


def test_lead_unset_is_the_bound() -> None:
    assert tiny_config(**{"rollout.max_staleness": 5}).rollout.effective_lead == 5
    assert tiny_config(**{"rollout.max_staleness": 5, "rollout.lead": 0}).rollout.effective_lead == 0


def sections() -> Iterator[tuple[type[Section], ast.ClassDef]]:
    """Yield every group of settings in asyncrl/config, with its source."""
    for found in pkgutil.iter_modules(module.__path__):
        imported = importlib.import_module(f"{module.__name__}.{found.name}")
        yield from sections_of(imported)
    yield from sections_of(module)


def sections_of(imported: ModuleType) -> Iterator[tuple[type[Section], ast.ClassDef]]:
    for node in ast.parse(Path(str(imported.__file__)).read_text()).body:
        if isinstance(node, ast.ClassDef) and issubclass(section := getattr(imported, node.name), Section):
            yield section, node


def test_every_group_of_settings_is_looked_at() -> None:
    """Those of the configuration, wherever they are defined."""
    seen = {section for section, _ in sections()}
    reached, queue = set[type[Section]](), [module.Config]
    while queue:
        reached.add(section := queue.pop())
        queue += [one for one in nested(section) if one not in reached]
    assert reached - {Choice} - seen == set()
    assert len(seen) > 20


def nested(section: type[Section]) -> list[type[Section]]:
    """Return the groups of settings that are fields of a section, themselves or in lists and dicts."""
    found, queue = [], [field.annotation for field in section.model_fields.values()]
    while queue:
        kind = queue.pop()
        if isinstance(kind, type) and issubclass(kind, Section):
            found.append(kind)
        queue += get_args(kind)
    return found


def test_every_field_says_what_it_means() -> None:
    """A group of settings says it as a class."""
    silent = [
        f"{section.__name__}.{name}"
        for section, source in sections()
        for name, field in section.model_fields.items()
        if name in section.__annotations__ and name not in docstrings(source)
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
    ]
    assert silent == []
    assert [section.__name__ for section, source in sections() if not ast.get_docstring(source)] == []


def test_values_live_in_conf_alone() -> None:
    """But for the sections that no file of conf/ has, since their names are the user's."""
    without_a_file = {"RoleConfig", "AuxiliaryModelConfig"}
    own = [
        f"{section.__name__}.{name}"
        for section, _ in sections()
        if section.__name__ not in without_a_file
        for name, field in section.model_fields.items()
        if not field.is_required()
    ]
    assert own == []


def test_composed_values_are_json() -> None:
    values = compose_values()
    assert json.loads(json.dumps(values)) == values


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine.count": 0}, "engine.count"),
        ({"engine.urls": ["gpu1:30000"]}, "engine.urls"),
        ({"engine.urls": ["http://gpu1:30000"] * 2}, "engine.urls"),
    ],
)
def test_fleet_without_engines_or_addresses_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(**changes)
    assert caught.value.field == field


def test_engines_that_run_already_may_be_all_there_are() -> None:
    assert tiny_config(**{"engine.count": 0, "engine.urls": ["http://gpu1:30000"]}).engine.count == 0


# --- what is gone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", REMOVED)
def test_setting_that_is_gone_is_refused_with_its_reason(field: str) -> None:
    name, _, value = field.partition("=")
    several = name == "sinks.names"
    with pytest.raises(ConfigError, match=LAST) as refused:
        load(tiny_values(**{name: [value] if several else value or 1}))
    assert refused.value.field == (f"{name}.0" if several else name)
    assert REMOVED[field] in refused.value.remedy


@pytest.mark.parametrize(("old", "new"), MOVED_SETTINGS.items())
def test_setting_that_moved_is_refused_with_its_new_name(old: str, new: str) -> None:
    with pytest.raises(ConfigError, match=f"It moved: set {new}"):
        load(tiny_values(**{old: 1}))


OF_EACH_SECTION = {name.partition(".")[0]: name for name in (*REMOVED, *MOVED_SETTINGS) if "=" not in name}


@pytest.mark.parametrize("field", OF_EACH_SECTION.values())
def test_command_with_what_is_gone_is_refused_alike(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its reason or its new name. One of each section: Hydra misses all fields of a section alike."""
    monkeypatch.setattr(sys, "argv", ["asyncrl-train", f"{field}=1"])
    reason = REMOVED.get(field) or f"It moved: set {MOVED_SETTINGS[field]}"
    with pytest.raises(CompositionError, match=re.escape(reason)):
        compose(CONF)


def test_settings_of_an_earlier_run_have_their_new_names() -> None:
    old, new = next(one for one in MOVED_SETTINGS.items() if one[1].startswith("slurm."))
    before = {"cluster": {old.partition(".")[2]: 7, "gpus": 1}, "mode": "train"}
    section, _, field = new.partition(".")
    assert under_new_names(before) == {"cluster": {"gpus": 1}, "mode": "train", section: {field: 7}}
    assert old.partition(".")[2] in before["cluster"]  # it is left as it is


def test_unknown_launcher_is_refused_with_the_known() -> None:
    with pytest.raises(ConfigError, match=r"Must be one of local, .*machines") as refused:
        tiny_config(**{**JOB, "cluster.launcher": "fleet"})
    assert refused.value.field == "cluster.launcher"
    assert tiny_config(**JOB).cluster.launcher == "machines"


def test_removed_setting_left_unset_does_not_stop_a_resume() -> None:
    megatron: dict[str, Any] = {"transformer": {"apply_rope_fusion": None}, "ddp": {}}
    before: dict[str, Any] = {"trainer": {"megatron": megatron, "mtp": None}, "mode": "train"}
    assert under_new_names(before) == {"trainer": {}, "mode": "train"}
    megatron["transformer"]["apply_rope_fusion"] = True
    assert under_new_names(before)["trainer"]["megatron"]["transformer"] == {"apply_rope_fusion": True}
