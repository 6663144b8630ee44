"""Which experts read a token, written down: as an engine tells it, as it crosses processes, as the trainer reads it.

An engine (SGLang's return_routed_experts) tells int32 [rows, layers, topk]: a row for each token that it has read (the
last token that it wrote was read by nobody), zeros in layers without experts. Here and on the wire only layers with
experts are kept, as uint8 (up to 256 experts) or little-endian uint16:

    Qwen3-30B-A3B   48 layers of 48, 8 experts of 128     1536 B per token told,  384 B kept
    DeepSeek-V3     58 layers of 61, 8 experts of 256     1952 B per token told,  464 B kept
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from asyncrl.types import Group, Routing, Trajectory, Turn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# numpy is imported inside functions: the launcher, which asks only for a model's shape, starts sooner without it


@dataclass(frozen=True)
class RoutingShape:
    """Of one token's experts in one model."""

    layers: int  # all of the model's, as the engine counts them
    sparse: tuple[int, ...]  # numbers of those with experts, from 0
    topk: int  # experts of a token in each
    experts: int  # to choose from

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest integer that can name every expert."""
        return 1 if self.experts <= 256 else 2

    @property
    def width(self) -> int:
        """Bytes of a token, as kept."""
        return len(self.sparse) * self.topk * self.itemsize

    @property
    def told(self) -> int:
        """Bytes of a token, as the engine tells them."""
        return self.layers * self.topk * 4


def compact(told: bytes, shape: RoutingShape) -> bytes:
    """int32 [rows, layers, topk] -> the kept form. Raises ValueError when it is not of this shape, or names an expert
    that the model does not have."""
    import numpy as np

    if len(told) % shape.told:
        raise ValueError(f"{len(told)} bytes of routed experts are no rows of {shape.layers} x {shape.topk} int32")
    first, last = shape.sparse[0], shape.sparse[-1] + 1
    contiguous = len(shape.sparse) == last - first  # nearly all models: a view in the place of a copy
    chosen = slice(first, last) if contiguous else list(shape.sparse)
    rows = np.frombuffer(told, "<u4").reshape(-1, shape.layers, shape.topk)[:, chosen]  # unsigned: -1 is large
    if rows.size and (largest := int(rows.max())) >= shape.experts:
        raise ValueError(f"expert {largest} of a model that has {shape.experts}")
    return rows.astype(f"<u{shape.itemsize}").tobytes()


def unpacked(rows: bytes, shape: RoutingShape) -> NDArray[np.unsignedinteger]:
    """[rows, sparse layers, topk], a view. Raises ValueError when it is of another model's shape."""
    import numpy as np

    if len(rows) % shape.width:
        raise ValueError(f"{len(rows)} bytes are no rows of {shape.width} bytes")
    return np.frombuffer(rows, f"<u{shape.itemsize}").reshape(-1, len(shape.sparse), shape.topk)


def share_prompt(group: Group) -> Group:
    """The same group with the rows of its prompt kept once: those of the first sibling that has them all. (Engines
    compute a prompt once for all siblings but its last token; where the siblings' rows of that differ, the trainer,
    which reads one prompt for all, could replay only one of them, too.) Every turn keeps the rows that no turn before
    it has."""
    length = len(group.prompt_ids)
    if all(turn.completion.routing is None for t in group.trajectories for turn in t.turns):
        return group
    firsts = (t.turns[0].completion.routing for t in group.trajectories if t.turns)
    prompt = next((r for r in firsts if r and r.start == 0 and r.end >= length), None)
    shared = Routing(0, prompt.width, prompt.rows[: length * prompt.width]) if prompt else None
    trajectories = [Trajectory(_new_rows(t, length), t.reward) for t in group.trajectories]
    return msgspec.structs.replace(group, trajectories=trajectories, routing=shared)


def _new_rows(trajectory: Trajectory, prompt: int) -> list[Turn]:
    """Rows of a sample's first turn begin to be its own where the prompt ends (at once, where it follows none); a later
    one's do at the last token written before."""
    found = list(trajectory.turns)
    for sample in trajectory.samples():
        start = end = 0 if sample[0][1].begins else prompt
        for place, turn in sample:
            completion = turn.completion
            if completion.routing:
                cut = msgspec.structs.replace(completion, routing=completion.routing.since(start))
                found[place] = msgspec.structs.replace(turn, completion=cut)
            end += len(turn.observation) + len(completion.token_ids)
            start = max(start, end - 1)
    return found
