"""Fields of Megatron's dataclasses pass through, except unknown ones and those that break a promise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncrl.backends.cpu import megatron_shim
from asyncrl.errors import ConfigError
from asyncrl.launch.megatron_fields import REFUSED, check_fields, fields, refusal
from tests.fakes import tiny_config

megatron_shim.enable()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402


def refused(section: str, name: str, value: Any, family: dict[str, Any] | None = None) -> ConfigError:
    trainer = tiny_config(**{f"trainer.megatron.{section}": {name: value}}).trainer
    with pytest.raises(ConfigError) as caught:
        check_fields(trainer, family or {})
    assert caught.value.field == f"trainer.megatron.{section}.{name}"
    return caught.value


@pytest.mark.parametrize(
    ("section", "latent", "of"),
    [
        ("transformer", False, TransformerConfig),
        ("transformer", True, MLATransformerConfig),
        ("ddp", False, DistributedDataParallelConfig),
        ("optimizer", False, OptimizerConfig),
    ],
)
def test_parsed_fields_are_those_of_the_dataclass(section: str, latent: bool, of: Any) -> None:
    assert fields(section, latent=latent).keys() == {field.name for field in dataclasses.fields(of)}


@pytest.mark.parametrize("section", REFUSED)
def test_every_reason_is_given_for_some_field(section: str) -> None:
    """A pattern that matches nothing protects nothing."""
    known = fields(section, latent=True)
    for pattern, reason in REFUSED[section]:
        assert any(refusal(section, name) == reason for name in known), pattern


@pytest.mark.parametrize(
    ("section", "name", "value", "reason"),
    [
        ("transformer", "moe_permut_fusion", True, "Did you mean moe_permute_fusion"),
        ("transformer", "params_dtype", "bfloat16", "trainer.dtype"),
        ("transformer", "tensor_model_parallel_size", 2, "trainer.tensor_parallel"),
        ("transformer", "calculate_per_token_loss", False, "one denominator"),
        ("transformer", "variable_seq_lengths", False, "Packs differ in length"),
        ("transformer", "hidden_dropout", 0.1, "must be 0"),
        ("transformer", "moe_aux_loss_coeff", 0.01, "one denominator"),
        ("transformer", "moe_expert_capacity_factor", 1.0, "engines"),
        ("transformer", "moe_enable_routing_replay", True, "algo.routing_replay"),
        ("transformer", "deterministic_mode", True, "deterministic=true"),
        ("transformer", "num_layers", 3, "follows from the model"),
        ("transformer", "recompute_granularity", "full", "trainer.recompute"),
        ("transformer", "transformer_impl", "local", "trainer.layers"),
        ("transformer", "fp8", "e4m3", "trainer.fp8"),
        ("transformer", "fp8_param", True, "quantized bytes"),
        ("transformer", "tp_comm_overlap", True, "fixed number of rows"),
        ("ddp", "fp8_param_gather", True, "quantized bytes"),
        ("transformer", "finalize_model_grads_func", "f", "The trainer decides"),
        ("transformer", "apply_rope_fusion", "yes", "declares it as bool"),
        ("transformer", "moe_router_dtype", "bf16", "Literal"),
        ("ddp", "bucket_size", "large", "Optional"),
        ("ddp", "use_megatron_fsdp", True, "shard"),
        ("ddp", "grad_reduce_in_fp32", False, "float32"),
        ("optimizer", "use_precision_aware_optimizer", True, "moments_dtype"),
        ("optimizer", "lr", 1.0, "trainer.optimizer"),
        ("optimizer", "optimizer", "muon", "AdamW"),
    ],
)
def test_a_field_that_breaks_a_promise_is_refused_with_the_reason(
    section: str, name: str, value: Any, reason: str
) -> None:
    assert reason in str(refused(section, name, value))


def test_a_field_that_the_family_of_the_model_sets_is_refused() -> None:
    assert "follows from the model" in str(refused("transformer", "moe_router_dtype", "fp32", {"moe_router_dtype": 1}))


@pytest.mark.parametrize(
    ("section", "given"),
    [
        ("transformer", {"apply_rope_fusion": True, "moe_router_dtype": "fp32", "config_logger_dir": "x"}),
        ("ddp", {"bucket_size": 1000, "nccl_ub": False}),
        ("ddp", {"bucket_size": None}),
        ("optimizer", {"decoupled_weight_decay": False}),
    ],
)
def test_other_fields_pass(section: str, given: dict[str, Any]) -> None:
    check_fields(tiny_config(**{f"trainer.megatron.{section}": given}).trainer, {})
