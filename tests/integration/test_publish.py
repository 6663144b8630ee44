"""Publishing from several pipeline stages: all arrives once, and stages do not wait for each other needlessly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.models.tiny import write_random_model
from tests.fakes import tiny_config
from tests.integration.ranks import run_ranks

pytestmark = pytest.mark.integration

SIZES = {"vocab": 97, "hidden": 48, "layers": 4, "heads": 12, "kv_heads": 6, "intermediate": 36}


@pytest.mark.parametrize("when", ["alone", "beside"])
@pytest.mark.parametrize("order", ["turns", "at once"])
def test_stages_send_at_once_or_fill_before_their_turn(order: str, when: str, tmp_path: Path) -> None:
    """Two stages of two ranks, whose gathers all of a stage's ranks must enter together; alone, or beside the
    collectives of training, which changes the weights."""
    write_random_model(tmp_path / "model", "llama", **SIZES, tied=False, seed=0, dtype="bfloat16")  # type: ignore[arg-type]
    trainer = tiny_config(**{"trainer.dtype": "bfloat16"}).trainer
    run_ranks("weights:published", tmp_path, trainer, order, when, world=4)


FAILING = """
import sys, time
from types import SimpleNamespace as Fake
import asyncrl.trainer.__main__
from asyncrl.trainer.publishers import in_background
from asyncrl.trainer.publishers import NoEngines

class Failing(NoEngines):
    def complete(self, staged):
        raise RuntimeError("the broadcast broke")

first = sys.argv[1] == "0"
publisher = in_background(Failing(print, first=first), lambda *_, **__: None, Fake(is_first=first))
publisher.publish(1)
if not first:
    time.sleep(600)  # training, in collectives with other ranks
print("trained", flush=True)
while True:
    publisher.idle()
    time.sleep(0.01)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_whose_publish_fails_beside_training_ends(rank: int) -> None:
    """Rank 0 when it next looks, another rank at once, because nothing may reach it any more."""
    ended = subprocess.run(
        [sys.executable, "-c", FAILING, str(rank)], capture_output=True, text=True, timeout=400, check=False
    )
    assert ended.returncode == 1
    assert "RuntimeError: the broadcast broke" in ended.stderr
    assert ("trained" in ended.stdout) == (rank == 0)
