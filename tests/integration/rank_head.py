"""One rank of a test of the vocabulary-parallel head: python rank_head.py FILE, under torchrun.

Every rank reads FILE (hidden states, the whole weight, targets), takes its part of the vocabulary, and the first writes
values, gradients and central differences beside it, for the test to compare with one process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.trainer.head import Head

VOCAB, TEMPERATURE, STEP = 31, 0.7, 1e-5
CHUNK_ROWS = {"one-chunk": 1000, "chunks": 4}


class Rank:
    """One rank with its columns of the weight."""

    def __init__(self, given: dict[str, Tensor]) -> None:
        self.given, self.tp, rank = given, dist.get_world_size(), dist.get_rank()
        self.parallel: Any = SimpleNamespace(cp=1, tp=self.tp, tp_rank=rank, tp_group=dist.group.WORLD)
        self.columns = -(-VOCAB // self.tp)
        self.first = rank * self.columns

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the weight, [vocab, H] -> [V / tp, H].

        The padding has values that must not affect results.
        """
        padded = torch.cat([whole, torch.full((self.columns * self.tp - VOCAB, whole.shape[1]), 9.0)])
        return padded[self.first : self.first + self.columns].clone()

    def value(self, hidden: Tensor, weight: Tensor, chunk_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities, entropy, and a function of both."""
        pack: Any = SimpleNamespace(row_of_target=self.given["rows"], targets=self.given["targets"])
        head = Head(hidden, weight, VOCAB, chunk_rows, self.parallel)
        logprobs, entropy = head.score(pack, TEMPERATURE, entropy=True)
        assert entropy is not None
        total = (self.given["of_logprobs"] * logprobs).sum() + (self.given["of_entropy"] * entropy.square()).sum()
        return logprobs, entropy, total

    def run(self, chunk_rows: int) -> dict[str, Tensor]:
        """Return the values that the test compares."""
        hidden = self.given["hidden"].clone().requires_grad_()
        weight = self.part(self.given["weight"]).requires_grad_()
        logprobs, entropy, total = self.value(hidden, weight, chunk_rows)
        total.backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        parts = [torch.empty_like(weight.grad) for _ in range(self.tp)]
        dist.all_gather(parts, weight.grad)
        return {
            "logprobs": logprobs.detach(),
            "entropy": entropy.detach(),
            "hidden": hidden.grad,
            "weight": torch.cat(parts),
        }

    @torch.no_grad()
    def differences(self, chunk_rows: int) -> dict[str, Tensor]:
        """Return the same gradients by finite differences: one number is changed at a time, on all ranks."""
        found = {}
        for name in ("hidden", "weight"):
            gradient = torch.zeros_like(self.given[name])
            for place in range(gradient.numel()):
                sides = []
                for step in (STEP, -STEP):
                    moved = {key: self.given[key].clone() for key in ("hidden", "weight")}
                    moved[name].view(-1)[place] += step
                    sides.append(self.value(moved["hidden"], self.part(moved["weight"]), chunk_rows)[2])
                gradient.view(-1)[place] = (sides[0] - sides[1]) / (2 * STEP)
            found[name] = gradient
        return found


def main(file: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(load_file(file))
    outcomes = {name: rank.run(rows) for name, rows in CHUNK_ROWS.items()}
    outcomes["differences"] = rank.differences(CHUNK_ROWS["chunks"])
    if dist.get_rank() == 0:
        flat = {f"{kind}/{name}": x.contiguous() for kind, found in outcomes.items() for name, x in found.items()}
        save_file(flat, file.with_name(f"tp{rank.tp}.safetensors"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
