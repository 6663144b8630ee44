"""Answers of a recorded run as rows to train on: asyncrl-inspect RUN --rows.

A recording has tokens and not the messages that they were rendered from, so a row has texts as the model saw and wrote
them, alternately:

    {"rendered": ["<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n", "4<|im_end|>"], "reward": 1.0, ...}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.algo.samples import Sample, build_samples
from asyncrl.errors import RecordError
from asyncrl.jsonl import read_object
from asyncrl.schema import Group, Trajectory

RENDERED = "rendered"
"""Field of a row with texts in place of a conversation (mode=sft)."""
Decode = Callable[[Sequence[int]], str]
NO_CHARACTER = "\ufffd"
"""What stands for bytes that are no character, from which their tokens cannot be told."""


def decoder(run: Path) -> Decode:
    """Return what decodes the tokens of a run. Raises RecordError if its model is not here."""
    model = (read_object(run / "addresses.json") or {}).get("model")
    if not isinstance(model, str) or not Path(model).is_dir():
        raise RecordError(f"{run}: the model of this run ({model}) is not here, and only its tokenizer knows the texts")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def rows(group: Group, decode: Decode, wanted: Callable[[Trajectory], bool]) -> Iterator[dict[str, Any]]:
    """Yield the rows of those episodes of a group that are wanted: one for each of its samples, most often one. Samples
    with bytes that are no text are left out. Raises RecordError for images, which rows have none of."""
    for trajectory in filter(wanted, group.trajectories):
        (samples,) = build_samples([msgspec.structs.replace(group, trajectories=[trajectory])])
        for sample in samples:
            if sample.images:
                raise RecordError(f"group {group.uid} has images, which rows to train on cannot hold")
            texts = [decode(ids) for ids in _alternately(sample)]
            if texts and not any(NO_CHARACTER in text for text in texts):
                yield {RENDERED: texts, "reward": trajectory.total, "task": group.task, "uid": group.uid}


def _alternately(sample: Sample) -> list[list[int]]:
    """Return the tokens that were read and those that were written, alternately, up to the last that was written."""
    ids, mask = [*sample.prompt_ids, *sample.token_ids], [*[False] * len(sample.prompt_ids), *sample.mask]
    end = len(mask) - mask[::-1].index(True) if True in mask else 0
    places = groupby(range(end), key=mask.__getitem__)
    return [[ids[place] for place in own] for _, own in places]
