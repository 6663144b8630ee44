"""Encoding of expert routing (which experts processed each token), as engines report it and as asyncrl keeps it.

An engine (SGLang's return_routed_experts) reports int32 [rows, layers, topk]. It has one row for each token that the
engine has read, which excludes the last token that it generated, and zeros in layers without experts. asyncrl keeps and
sends only the layers with experts, as uint8 (up to 256 experts) or little-endian uint16:

    Qwen3-30B-A3B   48 layers of 48, 8 experts of 128     1536 B per token reported,  384 B kept
    DeepSeek-V3     58 layers of 61, 8 experts of 256     1952 B per token reported,  464 B kept
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from asyncrl.models.architectures import megatron_arguments
from asyncrl.models.family import HF
from asyncrl.schema import Group, TokenRows, Trajectory, Turn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# numpy is imported inside functions, because the launcher needs only a model's shape and starts faster without numpy


@dataclass(frozen=True)
class RoutingShape:
    """Shape of one token's expert routing in a model."""

    layers: int  # all layers of the model, as the engine counts them
    sparse: tuple[int, ...]  # indices of the layers with experts, from 0
    topk: int  # experts per token in each of them
    experts: int  # experts per layer

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest integer that can hold every expert's number."""
        return 1 if self.experts <= 256 else 2

    @property
    def width(self) -> int:
        """Bytes per token in the compact form."""
        return len(self.sparse) * self.topk * self.itemsize

    @property
    def told(self) -> int:
        """Bytes per token as the engine reports them."""
        return self.layers * self.topk * 4


def routing_shape(hf: HF) -> RoutingShape | None:
    """Return the shape of a token's routing, or None for a model without experts."""
    family = megatron_arguments(hf)
    if not family.get("num_moe_experts"):
        return None
    sparse = tuple(layer for layer, has_experts in enumerate(family["moe_layer_freq"]) if has_experts)
    return RoutingShape(hf["num_hidden_layers"], sparse, family["moe_router_topk"], family["num_moe_experts"])


def shape_of(hf: HF) -> RoutingShape:
    """Return the shape of a token's routing in a model that was checked: it has experts."""
    shape = routing_shape(hf)
    assert shape is not None, "check_model refuses models without experts"
    return shape


def compact(told: bytes, shape: RoutingShape) -> bytes:
    """Convert int32 [rows, layers, topk] to the compact form.

    Raises ValueError if the data has another shape, or contains an expert that the model does not have.
    """
    import numpy as np

    if len(told) % shape.told:
        raise ValueError(f"{len(told)} bytes of routed experts are not rows of {shape.layers} x {shape.topk} int32")
    first, last = shape.sparse[0], shape.sparse[-1] + 1
    contiguous = len(shape.sparse) == last - first  # true of nearly all models: a view instead of a copy
    chosen = slice(first, last) if contiguous else list(shape.sparse)
    rows = np.frombuffer(told, "<u4").reshape(-1, shape.layers, shape.topk)[:, chosen]  # unsigned: -1 is out of range
    if rows.size and (largest := int(rows.max())) >= shape.experts:
        raise ValueError(f"expert {largest} of a model with only {shape.experts} experts")
    return rows.astype(f"<u{shape.itemsize}").tobytes()


def unpacked(rows: bytes, shape: RoutingShape) -> NDArray[np.unsignedinteger]:
    """Return a view [rows, sparse layers, topk] of the compact form. Raises ValueError for another model's rows."""
    import numpy as np

    if len(rows) % shape.width:
        raise ValueError(f"{len(rows)} bytes are not rows of {shape.width} bytes")
    return np.frombuffer(rows, f"<u{shape.itemsize}").reshape(-1, len(shape.sparse), shape.topk)


def share_prompt(group: Group) -> Group:
    """Return the same group with the rows of its prompt stored once.

    They are the rows of the first sibling that has them all. Every turn keeps only the rows that no earlier turn has.

    Engines compute a prompt once for all siblings, except for its last token. Where the siblings' rows for that token
    differ, the trainer could replay only one of them anyway, because it reads one prompt for all.
    """
    length = len(group.prompt_ids)
    if all(turn.completion.token_rows is None for t in group.trajectories for turn in t.turns):
        return group
    firsts = (t.turns[0].completion.token_rows for t in group.trajectories if t.turns)
    prompt = next((r for r in firsts if r and r.start == 0 and r.end >= length), None)
    shared = TokenRows(0, prompt.width, prompt.rows[: length * prompt.width]) if prompt else None
    trajectories = [Trajectory(_new_rows(t, length), t.reward) for t in group.trajectories]
    return msgspec.structs.replace(group, trajectories=trajectories, token_rows=shared)


def _new_rows(trajectory: Trajectory, prompt: int) -> list[Turn]:
    """Return the turns with only their new rows.

    The first turn of a sample keeps the rows from the end of the prompt on, or all rows if it does not follow the
    prompt. A later turn keeps the rows from the last token generated before it.
    """
    found = list(trajectory.turns)
    for sample in trajectory.samples():
        start = end = 0 if sample[0][1].begins else prompt
        for place, turn in sample:
            completion = turn.completion
            if completion.token_rows:
                cut = msgspec.structs.replace(completion, token_rows=completion.token_rows.since(start))
                found[place] = msgspec.structs.replace(turn, completion=cut)
            end += len(turn.observation) + len(completion.token_ids)
            start = max(start, end - 1)
    return found
