"""Layouts, algorithms and batch of test_losses.py, shared with its ranks."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor

from asyncrl.algo.correction import CORRECTIONS
from asyncrl.algo.loss import LOSSES
from asyncrl.algo.masks import MASKS
from asyncrl.schema import Completion, Group, Trajectory, Turn, VersionSpan
from asyncrl.settings import Choice

VOCAB = 33  # padded by two ranks and by four
SMALL = 48  # tokens of a micro-batch: a group or two
VERSION = 4  # that the batch trains
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "single": {},
        "unshared": {"share_prompts": False},
        "micro-batches": {"micro_batch_tokens": SMALL},
        "shuffled": {"micro_batch_tokens": SMALL},
        "chunks": {"logit_rows": 3},
        "parts": {"batch_parts": 3, "micro_batch_tokens": SMALL},
    },
    2: {
        "tp2": {"tensor_parallel": 2},
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True, "micro_batch_tokens": SMALL},
        "pp2": {"pipeline_parallel": 2, "micro_batch_tokens": SMALL},
        "dp2": {"data_parallel": 2},
        "dp2-parts": {"data_parallel": 2, "batch_parts": 5},
        "pp2-parts": {"pipeline_parallel": 2, "micro_batch_tokens": SMALL, "batch_parts": 2},
    },
    4: {
        "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2, "micro_batch_tokens": SMALL},
        "dp2-tp2-sp": {"data_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
        "dp2-pp2": {"data_parallel": 2, "pipeline_parallel": 2, "micro_batch_tokens": SMALL},
        "tp4": {"tensor_parallel": 4, "logit_rows": 7},
    },
}
"""Layouts as settings of the trainer, by number of processes."""

BOUNDS: dict[str, Any] = {
    "sequence": (0.5, 4.0),
    "geometric": (0.8, 1.2),
    "opsm": 0.05,
    "lag": 2,
}
"""Bounds of the masks; each removes some sequences of the batch."""
OFF = dict.fromkeys(BOUNDS)


def fitting(name: str) -> dict[str, Any]:
    """Return the settings of a loss with a suitable aggregation and correction."""
    traits = LOSSES.find(Choice(name=name)).traits
    return {
        "loss": name,
        "aggregation": "sequence" if traits.per_sequence else "token",
        "correction": None if traits.corrects else "tis",
    }


def _of_loss(name: str) -> dict[str, Any]:
    """Return the settings of a loss with two optimizer steps; in the second the policy differs from the proximal
    one."""
    return {**fitting(name), "epochs": 2}


ALGORITHMS: dict[str, dict[str, Any]] = {
    **{f"loss-{name}": _of_loss(name) for name in LOSSES},
    **{f"weight-{name}": {"correction": {"name": name, "floor": 0.7, "cap": 1.5}} for name in CORRECTIONS},
    **{f"mask-{name}": {"correction": None, "mask": {**OFF, name: BOUNDS[name]}} for name in MASKS},
    "all-masks": {"correction": "icepop", "mask": BOUNDS},
    "constant": {"aggregation": "constant", "correction": None},
    "sequence": {"aggregation": "sequence"},
    "dual-clip": {"loss.dual_clip": 1.1, "epochs": 2},
    "log-linear": {"proximal": "log_linear", "correction": None},
    "behaviour": {"proximal": "behaviour", "correction": None},
    "entropy": {"entropy_bonus": 0.1, "mini_batches": 2},
}
"""Settings of the algorithm in addition to the defaults."""

DEPENDS_ON_ORDER = {"entropy"}  # which groups share a mini-batch


def runs(layout: str, algorithm: str) -> bool:
    """Return whether an algorithm gives the same results in this layout: mini-batches are parts of the batch in its
    order, and a batch in parts has a single step."""
    settings = ALGORITHMS[algorithm]
    if layout.endswith("parts"):
        return not {"epochs", "mini_batches"} & settings.keys()
    return layout != "shuffled" or algorithm not in DEPENDS_ON_ORDER


def joined(ranks: list[dict[str, tuple[Any, dict[str, Tensor]]]]) -> dict[str, tuple[Any, dict[str, Tensor]]]:
    """Return the figures of the first rank, and the gradients of all pipeline stages, by layout."""
    return {
        layout: (figures, {key: one for rank in ranks for key, one in rank[layout][1].items()})
        for layout, (figures, _) in ranks[0].items()
    }


def groups(shuffled: bool) -> list[Group]:
    """Return unequal prompts with a common prefix and unequal answers of several versions, some with tool output in
    between, a group without signal and a group of one member. With `shuffled`, the same in another order."""
    draw = random.Random(11)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(low, high))]

    def completion(ids: list[int]) -> Completion:
        cut, newest = draw.randint(0, len(ids)), draw.randint(1, VERSION)
        spans = [VersionSpan(newest - 1, 0, cut), VersionSpan(newest, cut, len(ids))]
        return Completion(ids, [-3.5 + 0.4 * draw.gauss(0, 1) for _ in ids], spans, "stop")

    head = tokens(9, 9)
    made = []
    for slot, size in enumerate((3, 1, 2, 4, 3)):
        trajectories = []
        for _ in range(size):
            turns = [Turn([], completion(tokens(1, 6)))]
            if draw.random() < 0.4:
                turns.append(Turn(tokens(2, 3), completion(tokens(1, 4))))
            trajectories.append(Trajectory(turns, 0.5 if slot == 2 else draw.random()))
        if shuffled:
            trajectories.reverse()
        made.append(Group(f"g{slot:08d}", slot, head + tokens(2, 7), trajectories, "drawn"))
    if shuffled:
        random.Random(0).shuffle(made)
    return made
