"""Widths of published models and the run's settings, as the arithmetic of memory takes them."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.extensions.plan.settings import layout_of, training_of
from asyncrl.extensions.plan.shapes import ParallelLayout, Shape, shape_of
from tests.fakes import GIVEN, tiny_config
from tests.models.published import DEEPSEEK_V3, QWEN3_MOE

REFERENCE = {"algo.kl.reference": "weights", "algo.kl.coefficient": 0.1, "algo.kl.reference_offload": False}
SIZES = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936, "num_attention_heads": 32}


def test_query_groups_share_keys_and_heads_may_be_wider() -> None:
    """Qwen3-30B-A3B."""
    found = shape_of({**QWEN3_MOE, **SIZES, "num_key_value_heads": 4, "head_dim": 128, "mlp_only_layers": [0]})
    assert found == Shape(
        layers=4,
        hidden=2048,
        queries=32 * 128,
        keys=4 * 128,
        values=4 * 128,
        inner=6144,
        vocab=151936,
        rotated=128,
        normed=True,
        sparse=3,
        experts=128,
        chosen=8,
        expert_inner=768,
        cache_heads=4,
        cached=2 * 4 * 128,
    )


def test_plain_model_has_equal_heads_that_share_the_width() -> None:
    plain = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "tie_word_embeddings": True, **SIZES}
    found = shape_of(plain)
    assert (found.queries, found.keys, found.values, found.cached) == (2048, 2048, 2048, 4096)
    assert (found.rotated, found.normed, found.tied, found.sparse) == (64, False, True, 0)
    assert shape_of({**plain, "partial_rotary_factor": 0.5}).rotated == 32


def test_latent_attention_caches_one_vector_on_every_rank() -> None:
    """DeepSeek-V3: 512 numbers and the 64 that are rotated."""
    found = shape_of({**DEEPSEEK_V3, **SIZES, "num_attention_heads": 128})
    assert (found.queries, found.keys, found.values) == (128 * 192, 128 * 192, 128 * 128)
    assert (found.cached, found.cache_heads, found.rotated) == (512 + 64, 1, 64)
    assert found.latent == 1536 + 512
    assert (found.sparse, found.chosen, found.expert_inner, found.shared_inner) == (58, 8, 2048, 2048)


def test_experts_split_as_all_else_unless_told() -> None:
    trainer = tiny_config(**{"trainer.tensor_parallel": 2, "trainer.data_parallel": 2}).trainer
    assert layout_of(trainer) == ParallelLayout(tensor=2, data=2, expert_tensor=2)
    assert layout_of(trainer.model_copy(update={"expert_tensor_parallel": 1})).expert_tensor == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"frozen": 0, "critic": False, "bucket": 0, "publishes": True}),
        ({"rollout.max_new_tokens": 60, "trainer.micro_batch_tokens": 50}, {"tokens": 60}),
        ({"rollout.max_new_tokens": 60, "trainer.micro_batch_tokens": 70}, {"tokens": 70}),
        ({"algo.advantage": "gae"}, {"critic": True}),
        ({"weights.staging": "stream", "weights.bucket_mb": 3}, {"bucket": 3 << 20}),
        ({"weights.transport": "disk", "weights.bucket_mb": 3}, {"bucket": 3 << 20}),
        (GIVEN, {"publishes": False}),
        ({"algo.kl.reference": "weights"}, {"frozen": 0}),  # nobody asks for it
        (REFERENCE, {"frozen": 1}),
        ({**REFERENCE, "algo.kl.reference_offload": True}, {"frozen": 0}),
    ],
)
def test_what_takes_memory_follows_from_the_settings(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    found = training_of(tiny_config(**changes), gpu=False)
    assert {name: getattr(found, name) for name in expected} == expected


def test_gpu_trainers_stream_weights_unless_told() -> None:
    buckets = [training_of(tiny_config(**{"weights.staging": word}), gpu=True).bucket for word in ("auto", "full")]
    assert training_of(tiny_config(**{"weights.overlap": True}), gpu=True).bucket == 0
    assert buckets == [512 << 20, 0]
