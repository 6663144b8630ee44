"""What quantized.format refuses: before anything starts, by field, value and remedy; and what engines start with."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from asyncrl import lookup
from asyncrl.config import Config, load, under_new_names
from asyncrl.errors import ConfigError
from asyncrl.extensions.quantized.fits import FIELD
from asyncrl.launch.checks.model import check_model
from asyncrl.launch.resume import differing
from asyncrl.removed import removal
from tests.fakes import ALONE, tiny_config

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 1024,
}
LLAMA: dict[str, Any] = {"num_hidden_layers": 2, **MODEL}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        (ALONE, FIELD, "has no trainer, which quantizes: set none"),
        ({"engine.dtype": "float32"}, "engine.dtype", "set bfloat16, or quantized.format=fp8_simulated"),
        ({"engine.server_args": {"load-format": "auto"}}, "engine.server_args.load_format", "remove one of the two"),
        (
            {"engine.server_args": {"json_model_override_args": "{}"}},
            "engine.server_args.json_model_override_args",
            "remove one of the two",
        ),
        ({"engine.urls": ["http://h:1"]}, "engine.urls", "hold no codes: remove them, or quantized.format=fp8_sim"),
        (
            {"trainer.lora.rank": 4, "weights.lora": "versions", "weights.transport": "auto"},
            FIELD,
            "set fp8_simulated, or set weights.lora=merged",
        ),
    ],
)
def test_setting_that_does_not_fit_is_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        tiny_config(**{FIELD: "fp8", "engine.dtype": "bfloat16", **changes})
    assert caught.value.field == field


def test_no_transport_with_a_loader_of_its_own_carries_codes() -> None:
    for name in (name for name, offered in lookup.offered("transports").items() if offered.loader):
        with pytest.raises(ConfigError, match=r"set auto or disk, or quantized\.format=int8_simulated"):
            tiny_config(**{FIELD: "int8", "engine.dtype": "bfloat16", "weights.transport": name})
        tiny_config(**{FIELD: "int8_simulated", "weights.transport": name})


def problems(config: Config, model: dict[str, Any], gpus: int = 8) -> list[ConfigError]:
    own = lookup.active(config)["quantized"]
    return list(own.launch().check_model(config, model, gpus))


def test_simulated_formats_fit_all_but_untrained_runs() -> None:
    made = tiny_config(**{FIELD: "int8_simulated"})
    assert made.changes_base  # the engines must not answer with the folder's weights
    assert not tiny_config().changes_base
    with pytest.raises(ConfigError, match="set none"):
        tiny_config(**{FIELD: "int8_simulated", **ALONE})


@pytest.mark.parametrize(
    ("changes", "tp", "kind", "remedy"),
    [
        ({}, 1, "fp8", None),
        ({}, 4, "fp8", None),
        ({}, 8, "fp8", None),  # key-value heads are replicated
        ({"head_dim": 64}, 4, "fp8", r"has 64 features of keys, which is no multiple of 128: lower engine\.tensor_par"),
        ({"head_dim": 64}, 4, "int8", None),
        ({"hidden_size": 576}, 1, "fp8", "has 576 features of the model"),
        ({"intermediate_size": 1152}, 2, "fp8", "has 576 features of an MLP"),
        ({"moe_ffn_hidden_size": 384}, 2, "fp8", "has 192 features of a routed expert, .* set fp8_simulated"),
        ({"moe_ffn_hidden_size": 384}, 2, "int8", None),
        ({"moe_ffn_hidden_size": 384, "expert_parallel": 2}, 2, "fp8", None),  # each expert is on one rank
        (LATENT, 2, "fp8", None),
        ({**LATENT, "qk_nope_head_dim": 32}, 4, "fp8", "has 192 features of queries"),
    ],
)
def test_blocks_cross_neither_ranks_nor_parts_of_a_fused_layer(
    changes: dict[str, int], tp: int, kind: str, remedy: str | None
) -> None:
    shape = {"engine.tensor_parallel": tp, "engine.expert_parallel": changes.get("expert_parallel", 1)}
    config = tiny_config(**{FIELD: kind, "engine.dtype": "bfloat16", **shape})
    found = problems(config, MODEL | changes)
    assert (found == []) if remedy is None else re.search(remedy, found[0].remedy)


@pytest.mark.parametrize(
    ("gpus", "more"),
    [(0, {}), (8, {"vision_config": {}}), (8, {"architectures": ["SmolLM3ForCausalLM"]})],
)
def test_engines_that_cannot_hold_codes_are_told_what_can(gpus: int, more: dict[str, Any]) -> None:
    real, simulated = (tiny_config(**{FIELD: kind, "engine.dtype": "bfloat16"}) for kind in ("fp8", "fp8_simulated"))
    (found,) = problems(real, MODEL | more, gpus)
    assert (found.field, found.value) == (FIELD, "fp8")
    assert "set fp8_simulated, which has the same values in engine.dtype" in found.remedy
    assert problems(simulated, MODEL | more, gpus) == []
    with pytest.raises(ConfigError, match="set fp8_simulated"):
        check_model(real, LLAMA, gpus=0)


@pytest.mark.parametrize("kind", ["fp8", "int8_simulated"])
@pytest.mark.parametrize(("model", "what"), [("Phi3", "fused layers"), ("GptOss", "stacked experts")])
def test_models_with_fused_files_are_refused(kind: str, model: str, what: str) -> None:
    config = tiny_config(**{FIELD: kind, "engine.dtype": "bfloat16"})
    (found,) = problems(config, {**MODEL, "architectures": [f"{model}ForCausalLM"]})
    assert f"{what}: set none" in found.remedy


def test_engines_with_codes_start_with_random_ones() -> None:
    real, simulated = (tiny_config(**{FIELD: kind, "engine.dtype": "bfloat16"}) for kind in ("fp8", "fp8_simulated"))
    found = lookup.engine_arguments(real, gpu=True)
    assert found["load_format"] == "dummy"
    assert json.loads(found["json_model_override_args"])["quantization_config"]["weight_block_size"] == [128, 128]
    assert lookup.engine_arguments(simulated, gpu=True) == {}
    told = [lookup.active(one)["quantized"].launch().memory(one) for one in (real, simulated)]
    assert told == [{"linear_bytes": 1}, {}]


def test_adapters_are_merged_where_engines_hold_codes() -> None:
    choose_lora = pytest.importorskip("asyncrl.extensions.lora.choice").choose_lora
    for kind, way in (("int8", "merged"), ("int8_simulated", "versions")):
        config = tiny_config(**{FIELD: kind, "engine.dtype": "bfloat16", "trainer.lora.rank": 4})
        assert choose_lora(config, LLAMA, 8)[0].weights.lora == way


def test_recorded_settings_keep_their_meaning_by_old_names() -> None:
    old = json.loads(tiny_config().model_dump_json())
    del old["quantized"]
    old["engine"]["quantization"] = "int8_simulated"
    config = load(under_new_names(old))
    assert config.quantized.format == "int8_simulated"
    assert differing(old, config) == []
    assert removal("engine.quantization") == "It moved: set quantized.format."
