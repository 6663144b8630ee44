"""Pipeline stages hold the layers that Megatron gives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.parallel import EngineParallel, PipelineSplit
from asyncrl.platforms import here

here().prepare_trainer()

from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402


def in_megatron(split: PipelineSplit, layers: int) -> list[list[range]]:
    """Return the layers of each chunk of each stage, from Megatron's own functions."""
    config: Any = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_layout=None,
        pipeline_model_parallel_size=split.stages,
        virtual_pipeline_model_parallel_size=split.chunks if split.chunks > 1 else None,
        num_layers_in_first_pipeline_stage=split.first,
        num_layers_in_last_pipeline_stage=split.last,
        account_for_embedding_in_pipeline_split=split.embedding,
        account_for_loss_in_pipeline_split=split.loss,
    )

    def chunk(stage: int, number: int | None) -> range:
        start = get_transformer_layer_offset(config, number, stage)
        return range(start, start + get_num_layers_to_build(config, number, stage))

    numbers = range(split.chunks) if split.chunks > 1 else [None]
    return [[chunk(stage, number) for number in numbers] for stage in range(split.stages)]


@given(st.data())
def test_stages_hold_the_layers_that_megatron_gives_them(data: st.DataObject) -> None:
    stages, chunks = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    middle, layers, first, last, embedding, loss = data.draw(st.integers(2, 4)) * chunks, 0, None, None, False, False
    if data.draw(st.booleans()):
        sizes = st.one_of(st.none(), st.integers(1, 4).map(lambda size: size * chunks))
        first, last = data.draw(sizes), data.draw(sizes)
        if chunks > 1 and stages == 2:  # Megatron divides by the number of stages between
            last = None
        others = stages - sum(size is not None for size in (first, last))
        layers = (first or 0) + (last or 0) + others * middle
    else:
        embedding, loss = data.draw(st.booleans()), data.draw(st.booleans())
        layers = stages * middle - embedding - loss
    split = PipelineSplit(stages, chunks, first, last, embedding, loss)
    found = split.chunk_layers(layers)
    assert found == in_megatron(split, layers)
    assert sorted(layer for stage in found for chunk in stage for layer in chunk) == list(range(layers))


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        (PipelineSplit(4, first=23, last=23), [23, 24, 24, 23]),
        (PipelineSplit(4, embedding=True, loss=True), [23, 24, 24, 23]),
        (PipelineSplit(8, first=11, last=11), [11, 12, 12, 12, 12, 12, 12, 11]),
    ],
)
def test_the_94_layers_of_qwen3_235b_divide(split: PipelineSplit, sizes: list[int]) -> None:
    assert [sum(map(len, stage)) for stage in split.chunk_layers(94)] == sizes
    with pytest.raises(ValueError, match="pipeline_parallel"):
        PipelineSplit(split.stages).chunk_layers(94)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(4, 1, [4]), (4, 2, [2, 2]), (94, 4, [23, 23, 24, 24]), (61, 8, [7, 7, 7, *[8] * 5])],
)
def test_the_last_stages_of_an_engine_have_one_layer_more(layers: int, stages: int, sizes: list[int]) -> None:
    """As in sglang/srt/distributed/utils.py, get_pp_indices; tests/integration/test_checksum.py loads such engines."""
    found = [EngineParallel(pp=stages).layers(layers, stage) for stage in range(stages)]
    assert [len(stage) for stage in found] == sizes
    assert [layer for stage in found for layer in stage] == list(range(layers))
