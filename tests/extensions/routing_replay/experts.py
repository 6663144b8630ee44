"""Experts that a token was sent to, as a function of its position."""

from __future__ import annotations

import numpy as np

from asyncrl.extensions.routing_replay.encoding import RoutingShape, compact
from asyncrl.schema import TokenRows

SHAPE = RoutingShape(layers=4, sparse=(1, 3), topk=2, experts=8)


def told(start: int, end: int, shape: RoutingShape = SHAPE, sibling: int = 0) -> np.ndarray:
    """int32 [rows, layers, topk]: another number for each position, layer and place; zeros in dense layers."""
    rows = np.zeros((end - start, shape.layers, shape.topk), np.int32)
    for row, position in enumerate(range(start, end)):
        for layer in shape.sparse:
            rows[row, layer] = (np.arange(shape.topk) + position + 3 * layer + 5 * sibling) % shape.experts
    return rows


def kept(start: int, end: int, shape: RoutingShape = SHAPE, sibling: int = 0) -> TokenRows:
    return TokenRows(start, shape.width, compact(told(start, end, shape, sibling).tobytes(), shape))
