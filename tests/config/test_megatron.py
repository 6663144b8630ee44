"""Fields of Megatron's dataclasses that pass through."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asyncrl.config import load
from asyncrl.config.megatron import ELSEWHERE, DdpFields, OptimizerFields, TransformerFields
from asyncrl.errors import ConfigError
from asyncrl.platforms import here
from asyncrl.settings import Section
from tests.fakes import compose_values, tiny_config

here().prepare_trainer()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

DATACLASSES = {
    TransformerFields: TransformerConfig,
    DdpFields: DistributedDataParallelConfig,
    OptimizerFields: OptimizerConfig,
}


def names(dataclass: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(dataclass)}


@pytest.mark.parametrize("section", DATACLASSES)
def test_fields_that_may_be_set_are_megatrons(section: type[Section]) -> None:
    assert section.model_fields.keys() <= names(DATACLASSES[section])


def test_fields_that_have_a_setting_are_megatrons_and_the_settings_exist() -> None:
    assert ELSEWHERE.keys() <= set().union(*map(names, DATACLASSES.values()))
    for setting in ELSEWHERE.values():
        value: Any = compose_values()
        for part in setting.split("."):
            assert part in value, setting
            value = value[part]


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("transformer", "moe_permut_fusion", True, "moe_permute_fusion"),
        ("transformer", "params_dtype", "bfloat16", "Set trainer.dtype instead"),
        ("transformer", "calculate_per_token_loss", False, "docs/parallelism.md"),
        ("transformer", "hidden_dropout", 0.1, "docs/parallelism.md"),
        ("transformer", "apply_rope_fusion", "yes", "valid boolean"),
        ("ddp", "bucket_size", "large", "valid integer"),
        ("ddp", "use_megatron_fsdp", True, "docs/parallelism.md"),
        ("optimizer", "lr", 1.0, "Set trainer.optimizer instead"),
        ("optimizer", "optimizer", "muon", "docs/parallelism.md"),
    ],
)
def test_other_field_is_refused_with_what_to_set(section: str, name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(**{f"trainer.megatron.{section}.{name}": value})
    assert caught.value.field == f"trainer.megatron.{section}.{name}"
    assert remedy in caught.value.remedy


def test_field_that_is_not_set_is_not_passed() -> None:
    ddp = load(compose_values("trainer.megatron.ddp={bucket_size: 1000, nccl_ub: false}")).trainer.megatron.ddp
    assert ddp.model_dump(exclude_none=True) == {"bucket_size": 1000, "nccl_ub": False}
