"""An HF config in Megatron's terms: every family's, in the old and the new spelling, and what is refused."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from asyncrl.errors import ConfigError
from asyncrl.models.architectures import check_architecture, flat, megatron_arguments
from asyncrl.models.families import known_families
from asyncrl.models.parts import rotary
from asyncrl.models.tiny import write_random_model
from tests.models.page import cells
from tests.models.published import (
    DEEPSEEK_V3,
    DEEPSEEK_V3_1,
    DENSE,
    FP8,
    GLM_4_6,
    GLM_4_7_FLASH,
    GPT_OSS_20B,
    KIMI_K2,
    QWEN3_MOE,
)

HY3 = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
}
GEMMA_3 = DENSE["Gemma-3 1B"]
LINEAR = {"rope_type": "linear", "factor": 8.0}
LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}


def test_deepseek_v3_as_published() -> None:
    check_architecture(DEEPSEEK_V3)
    found = megatron_arguments(DEEPSEEK_V3)
    assert found["moe_layer_freq"] == [0, 0, 0] + [1] * 58
    assert (found["moe_router_num_groups"], found["moe_router_group_topk"]) == (8, 4)
    assert found["moe_shared_expert_intermediate_size"] == 2048
    assert (found["rotary_scaling_factor"], found["mscale_all_dim"]) == (40, 1.0)
    assert rotary(DEEPSEEK_V3)["rope_type"] == "yarn"
    assert found["moe_router_bias_update_rate"] == 0.0


def test_deepseek_v3_1_and_kimi_k2_as_published() -> None:
    """Both in FP8, and Kimi-K2 under a model type of its own."""
    check_architecture(DEEPSEEK_V3_1)
    assert megatron_arguments(DEEPSEEK_V3_1) == megatron_arguments(DEEPSEEK_V3)
    check_architecture(KIMI_K2)
    found = megatron_arguments(KIMI_K2)
    assert (found["num_moe_experts"], found["moe_router_num_groups"]) == (384, None)
    assert found["moe_layer_freq"] == [0] + [1] * 60
    assert (rotary(KIMI_K2)["rope_theta"], rotary(KIMI_K2)["factor"]) == (50000.0, 32.0)


def test_gpt_oss_as_published() -> None:
    """In MXFP4, with windows in every second layer."""
    check_architecture(GPT_OSS_20B)
    found = megatron_arguments(GPT_OSS_20B)
    assert (found["window_size"], found["window_attn_skip_freq"]) == ((127, 0), [1, 0] * 12)
    with pytest.raises(ConfigError, match=r"attention_bias=false"):
        check_architecture({**GPT_OSS_20B, "attention_bias": False})
    with pytest.raises(ConfigError, match=r"rope_type=yarn"):
        check_architecture({**GPT_OSS_20B, "rope_scaling": {**GPT_OSS_20B["rope_scaling"], "attention_factor": 2.0}})


def test_glm_4_6_4_7_and_flash_as_published() -> None:
    check_architecture(GLM_4_6)
    found = megatron_arguments(GLM_4_6)
    assert (found["qk_layernorm"], found["add_qkv_bias"], found["num_moe_experts"]) == (True, True, 160)
    assert found["moe_layer_freq"] == [0] * 3 + [1] * 89
    assert rotary(GLM_4_6)["partial_rotary_factor"] == 0.5
    check_architecture(GLM_4_7_FLASH)
    found = megatron_arguments(GLM_4_7_FLASH)
    assert (found["q_lora_rank"], found["v_head_dim"], found["moe_router_topk_scaling_factor"]) == (768, 256, 1.8)
    assert found["moe_shared_expert_intermediate_size"] == 1536


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_as_published(name: str) -> None:
    check_architecture(DENSE[name])
    megatron_arguments(DENSE[name])


def test_gemma_3_has_windows_in_five_layers_of_six() -> None:
    found = megatron_arguments(GEMMA_3)
    assert (found["window_size"], found["window_attn_skip_freq"]) == ((511, 0), ([1] * 5 + [0]) * 4 + [1, 1])
    assert found["softmax_scale"] == 1 / 16
    assert flat(GEMMA_3)["tie_word_embeddings"]
    assert not flat({**GEMMA_3, "tie_word_embeddings": False})["tie_word_embeddings"]


@pytest.mark.parametrize("scaling", [None, LINEAR])
def test_gemma_3_rotates_by_kinds_of_layers_in_either_spelling(scaling: dict[str, Any] | None) -> None:
    """transformers 5 makes the new one of the old one."""
    old = {**GEMMA_3, "rope_scaling": scaling}
    new = AutoConfig.for_model("gemma3_text", **old).to_dict()
    local = known_families()["Gemma3ForCausalLM"].local_theta
    for hf in (old, {**new, "architectures": old["architectures"]}):
        check_architecture(hf)
        expected = {"rope_theta": 1e6, "rope_type": "default", **(scaling or {})}
        assert {key: rotary(hf)[key] for key in expected} == expected
        assert local(hf) == 1e4


def test_smollm3_rotates_three_layers_of_four() -> None:
    assert megatron_arguments(DENSE["SmolLM3"])["no_rope_freq"] == [0, 0, 0, 1] * 9


def test_hunyuan_3_has_dense_layers_first_in_either_spelling() -> None:
    hf = {"architectures": ["HYV3ForCausalLM"], **HY3, "num_hidden_layers": 4}
    found = megatron_arguments(hf)
    assert found["moe_layer_freq"] == [0, 1, 1, 1]
    assert (found["moe_router_topk_scaling_factor"], found["moe_shared_expert_intermediate_size"]) == (2.826, 1536)
    assert megatron_arguments({**hf, "mlp_layer_types": ["dense"] + ["sparse"] * 3}) == found


def test_one_group_of_experts_is_no_group() -> None:
    found = megatron_arguments({**DEEPSEEK_V3, "n_group": 1, "topk_group": 1})
    assert found["moe_router_num_groups"] is found["moe_router_group_topk"] is None


def test_qwen3_moe_as_published() -> None:
    check_architecture(QWEN3_MOE)
    found = megatron_arguments(QWEN3_MOE)
    assert (found["num_moe_experts"], found["moe_layer_freq"]) == (128, [1, 1, 1, 1])
    assert not found["moe_router_pre_softmax"]


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
    ],
)
def test_qwen_says_which_layers_have_experts(fields: dict[str, Any], layers: list[int]) -> None:
    assert megatron_arguments({**QWEN3_MOE, **fields})["moe_layer_freq"] == layers


def test_new_and_old_spelling_of_rotary_embeddings_say_the_same() -> None:
    old = {**LLAMA, "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 2.0}
    found = rotary(old)
    assert {key: found[key] for key in new} == rotary({**LLAMA, "rope_parameters": new})
    assert rotary(LLAMA) == {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, "rope_type": "default"}
    assert rotary(flat({"architectures": ["Glm4MoeForCausalLM"]}))["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("kind", [family.model_type for family in known_families().values() if not family.tower])
def test_what_transformers_writes_for_a_family_is_accepted(kind: str, tmp_path: Path) -> None:
    sizes = {"vocab": 9, "hidden": 16, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate": 8}
    write_random_model(tmp_path / "model", kind, **sizes, tied=False, seed=0, dtype="bfloat16")
    hf = json.loads((tmp_path / "model" / "config.json").read_text())
    check_architecture(hf)
    assert known_families()[hf["architectures"][0]].model_type == kind


@pytest.mark.parametrize(
    ("hf", "said"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"MambaForCausalLM.*Supported architectures: .*LlamaForCausalLM"),
        ({}, "none named"),
        ({"architectures": ["Ernie4_5_MoeForCausalLM"]}, "a bias chooses experts beside a softmax"),
        ({"architectures": ["MiniMaxM2ForCausalLM"]}, "over all heads together.*on GPUs alone"),
        ({"architectures": ["HunYuanMoEV1ForCausalLM"]}, "after their rotation"),
        ({"architectures": ["Llama4ForCausalLM"]}, "chunks of 8192 positions"),
        ({"architectures": ["Llama4ForConditionalGeneration"]}, "chunks of 8192 positions"),
        ({"architectures": ["HYV3ForCausalLM"], **HY3, "route_norm": False}, "route_norm=false"),
        ({"architectures": ["HYV3ForCausalLM"], **HY3, "mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
        ({**LLAMA, "attention_bias": True}, "attention_bias=true.*biases are not supported"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias=true.*biases are not supported"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act=gelu"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type=dynamic.*default, linear, llama3"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn.*attention_factor"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "quantization_config.*bfloat16"),
        ({**LLAMA, "quantization_config": {**FP8, "weight_block_size": [64, 64]}}, "quantization_config.*bfloat16"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "sliding_window=4096"),
        ({"architectures": ["SeedOssForCausalLM"], "attention_out_bias": True}, "attention_out_bias=true"),
        ({"architectures": ["Ernie4_5ForCausalLM"], "use_bias": True}, "use_bias=true"),
        ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}}, "rope_type=longrope"),
        ({"architectures": ["SmolLM3ForCausalLM"]}, "no no_rope_layers"),
        ({**GEMMA_3, "final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({**GEMMA_3, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({**GEMMA_3, "hidden_activation": "gelu"}, "hidden_activation=gelu.*gelu_pytorch_tanh"),
        ({**GEMMA_3, "tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({**GEMMA_3, "rope_parameters": {"sliding_attention": LINEAR}}, "rope_type=linear of sliding_attention"),
        ({**GEMMA_3, "architectures": ["Gemma3ForConditionalGeneration"]}, "in both directions"),
        ({**QWEN3_MOE, "use_sliding_window": True}, "sliding_window=4096"),
        ({**QWEN3_MOE, "num_experts_per_tok": 1}, "num_experts_per_tok=1.*normalized"),
        ({**DEEPSEEK_V3, "rope_interleave": False}, "rope_interleave=false"),
        ({**DEEPSEEK_V3, "norm_topk_prob": False}, "norm_topk_prob=false"),
        ({**DEEPSEEK_V3, "topk_group": 2}, "num_experts_per_tok=8, topk_group=2.*two best"),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, "scoring_func=softmax"),
        ({key: value for key, value in DEEPSEEK_V3.items() if key != "kv_lora_rank"}, "no kv_lora_rank"),
    ],
)
def test_what_would_give_other_logits_is_refused(hf: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        check_architecture(hf)
    assert caught.value.field == "model.path"
    remedies = ("Choose another model", "Supported architectures", "convert to bfloat16", "copy the file")
    assert any(remedy in str(caught.value) for remedy in remedies)


def test_yarn_without_a_factor_on_sines_and_cosines_is_accepted() -> None:
    check_architecture({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}})


@pytest.mark.parametrize("name", [name for name, family in known_families().items() if family.serving.reports_experts])
def test_engines_report_experts_where_layers_are_numbered(name: str) -> None:
    """Without a number, what a layer chose has no place in a report."""
    (sglang,) = find_spec("sglang").submodule_search_locations or ()
    sources = [file.read_text() for file in Path(sglang, "srt/models").glob("*.py")]
    (source,) = [one for one in sources if f"class {name}(" in one] or [""]  # or transformers' modules
    calls = re.findall(r"\bTopK\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)", source)
    assert all("layer_id=" in call or "**topk_kwargs" in call for call in calls)


def test_page_of_models_has_a_row_per_record() -> None:
    lines = Path("docs/models.md").read_text().splitlines()
    rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| `") and line.count(" | ") == 7]
    found = {name.strip("`"): said for name, _, *said in rows}
    del found["architectures"]
    assert found == {name: cells(family) for name, family in known_families().items()}
