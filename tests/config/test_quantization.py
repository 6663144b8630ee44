"""What engine.quantization refuses: before anything starts, by field, value and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.config.quantization import check_codes
from asyncrl.errors import ConfigError
from tests.fakes import tiny_config

MODEL = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 1024,
}
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
        ({"mode": "rollout_only", "record": True}, "engine.quantization", "has no trainer, which quantizes: set none"),
        ({"engine.dtype": "float32"}, "engine.dtype", "set bfloat16, or engine.quantization=fp8_simulated"),
        ({"engine.server_args": {"load-format": "auto"}}, "engine.server_args.load_format", "remove one of the two"),
        (
            {"engine.server_args": {"json_model_override_args": "{}"}},
            "engine.server_args.json_model_override_args",
            "remove one of the two",
        ),
        ({"engine.urls": ["http://h:1"]}, "engine.urls", "hold no codes: remove them, or engine.quantization=fp8_sim"),
        (
            {"trainer.lora.rank": 4, "weights.lora": "versions", "weights.transport": "auto"},
            "engine.quantization",
            "set fp8_simulated, or set weights.lora=merged",
        ),
    ],
)
def test_setting_that_does_not_fit_is_refused(changes: dict[str, Any], field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        tiny_config(**{"engine.quantization": "fp8", "engine.dtype": "bfloat16", **changes})
    assert caught.value.field == field


def test_simulated_formats_fit_all_of_it_but_a_run_without_a_trainer() -> None:
    made = tiny_config(**{"engine.quantization": "int8_simulated"})
    assert made.changes_base  # the engines must not answer with the folder's weights
    assert not tiny_config().changes_base
    with pytest.raises(ConfigError, match="set none"):
        tiny_config(**{"engine.quantization": "int8_simulated", "mode": "rollout_only", "record": True})


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
    config = tiny_config(**{"engine.quantization": kind, "engine.dtype": "bfloat16", **shape})
    if remedy is None:
        check_codes(config, MODEL | changes, gpu=True, sees=False)
        return
    with pytest.raises(ConfigError, match=remedy):
        check_codes(config, MODEL | changes, gpu=True, sees=False)


@pytest.mark.parametrize("where", [{"gpu": False, "sees": False}, {"gpu": True, "sees": True}])
def test_engines_that_cannot_hold_codes_are_told_what_can(where: dict[str, bool]) -> None:
    real, simulated = (
        tiny_config(**{"engine.quantization": kind, "engine.dtype": "bfloat16"}) for kind in ("fp8", "fp8_simulated")
    )
    with pytest.raises(ConfigError, match="set fp8_simulated, which has the same values in engine") as caught:
        check_codes(real, MODEL, **where)
    assert (caught.value.field, caught.value.value) == ("engine.quantization", "fp8")
    check_codes(simulated, MODEL, **where)
