"""The cost of a token equals one computed by hand."""

from __future__ import annotations

import pytest

from asyncrl.algo.balance import TOKEN
from asyncrl.trainer.operations import costs_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def test_dense_model_by_hand() -> None:
    weights = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 100)
    costs = costs_of(LLAMA)
    assert costs.pair / TOKEN == pytest.approx(3 * 4 * 32 * 7 / (6 * weights), rel=1e-4)
    assert costs.row / TOKEN == pytest.approx(64 * 1000 / weights, rel=1e-4)


def test_a_window_bounds_what_a_token_costs_in_its_layers() -> None:
    windowed = {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": 10,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    weights = 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 100)
    pair = 4 * 32 * 7
    token = 6 * weights + 2 * 10 * pair
    costs = costs_of({**LLAMA, **windowed})
    assert costs.pair / TOKEN == pytest.approx(pair / token, rel=1e-3)
    assert costs.row / TOKEN == pytest.approx(6 * 64 * 1000 / token, rel=1e-3)


def test_only_the_experts_that_a_token_meets_count() -> None:
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 50,
        "mlp_only_layers": [],
    }
    assert costs_of({**LLAMA, **experts}) == costs_of(LLAMA)  # two of 50 are one of 100


def test_latent_attention_by_hand() -> None:
    deepseek = {
        **LLAMA,
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 8,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 2,
        "v_head_dim": 5,
        "rope_theta": 10000.0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    }
    attention = 64 * 8 + 8 * 4 * 8 + 64 * 12 + 10 * 4 * 11 + 4 * 5 * 64
    weights = 3 * attention + 3 * 64 * (100 + 2 * 120)
    assert costs_of(deepseek).pair / TOKEN == pytest.approx(3 * 4 * 13 * 7 / (6 * weights), rel=1e-4)
