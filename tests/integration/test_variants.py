"""Settings that save memory or time change no bit of an update: recomputation of activations, in which routers replay
the same experts again, and communication that overlaps with computation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import reusing
from tests.integration.variants import (
    AGAIN,
    OVERLAP,
    OVERLAPPED,
    PARTS,
    RECOMPUTED,
    UNCLIPPED,
    check_overlap,
    check_recomputation,
    run,
)

pytestmark = pytest.mark.integration


def repeated(layouts: Iterable[str], *among: str) -> list[Any]:
    """Return the layouts as parameters. Those that others contain are campaigns."""
    return [pytest.param(name, marks=[pytest.mark.campaign] if name in among else []) for name in layouts]


@pytest.mark.parametrize("layout", repeated(RECOMPUTED, "single", "ep2", "tp2-sp", "pp2"))
def test_recomputation_changes_no_bit_of_an_update(layout: str, tmp_path: Path) -> None:
    check_recomputation(tmp_path, layout)


@pytest.mark.parametrize("layout", repeated(OVERLAPPED, "cp2", "ep2"))
def test_overlapped_communication_updates_to_the_bit(layout: str, tmp_path: Path) -> None:
    check_overlap(tmp_path, layout, OVERLAPPED[layout], **AGAIN)


def test_overlapped_gradients_of_parts_are_reduced_once(tmp_path: Path) -> None:
    check_overlap(tmp_path, "dp2", ["llama-tied"], **PARTS)


def test_a_critic_is_trained_alike_with_overlapped_communication(tmp_path: Path) -> None:
    run(tmp_path, "dp2", {"llama-tied": OVERLAP}, **UNCLIPPED, **{"algo.advantage": "gae"})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_optimizer_trains_the_same_bits(dtype: str, tmp_path: Path) -> None:
    """Storages of the CPU are moved as those of a GPU would be, and the weights start anew after the first batch."""
    algo = {"trainer.dtype": dtype, **reusing(reset_every=1, reset_share=0.5)}
    counts = run(tmp_path, "dp2", {"llama-tied": {"offload": {".offload.optimizer": True}}}, **algo)
    assert counts["llama-tied"]["offload"]["away"] > 0
