"""Fields of Megatron's dataclasses that pass through."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.config import load
from asyncrl.config.megatron import DdpFields
from asyncrl.errors import ConfigError
from asyncrl.platforms import here
from tests.fakes import compose_values, tiny_config

here().prepare_trainer()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402


def test_fields_that_may_be_set_are_megatrons() -> None:
    names = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    assert DdpFields.model_fields.keys() <= names


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("trainer.megatron.ddp.bucket_size", "large", "valid integer"),
        ("trainer.megatron.ddp.use_megatron_fsdp", True, "No such field"),
        ("trainer.megatron.transformer", {"apply_rope_fusion": None}, "trainer.megatron.ddp remains"),
    ],
)
def test_other_field_is_refused(field: str, value: object, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(**{field: value})
    assert caught.value.field == field
    assert remedy in caught.value.remedy


def test_field_that_is_not_set_is_not_passed() -> None:
    ddp = load(compose_values("trainer.megatron.ddp={bucket_size: 1000, nccl_ub: false}")).trainer.megatron.ddp
    assert ddp.model_dump(exclude_none=True) == {"bucket_size": 1000, "nccl_ub": False}
