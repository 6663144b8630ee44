"""The micro-batches of this rank for one optimizer step (those of its replica, or its context-parallel part of them),
and what the passes over them give for each token, gathered on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.algo.balance import Costs, assign_micro_batches
from asyncrl.algo.context_parallel_split import bounds_of, part
from asyncrl.algo.pack import Pack, pack
from asyncrl.algo.samples import Sample
from asyncrl.config import TrainerConfig
from asyncrl.parallel import Parallel

Groups = Sequence[list[Sample]]

IDLE = [[Sample([0], [0], [False], number=0, first_row=0)]]
"""A placeholder micro-batch of one token that is not trained."""


def packs_of_rank(
    groups: Groups,
    trainer: TrainerConfig,
    parallel: Parallel,
    costs: Costs,
    placed: Callable[[Pack], Pack] = lambda pack: pack,
) -> list[Pack]:
    """Return the packs of this rank, at least one. Replicas that share experts communicate in every micro-batch, so all
    of them get as many as the replica with the most. Interleaved stages run whole rounds of micro-batches. `placed`
    finds the images in this rank's part of a pack."""
    p = parallel
    rounds = p.pp if trainer.virtual_pipeline > 1 else 1
    experts_cross_replicas = p.tp % (p.etp * p.ep) != 0
    limit, share = trainer.micro_batch_tokens, trainer.share_prompts
    every = assign_micro_batches(groups, p.dp, limit, costs, share=share, equal=experts_cross_replicas, rounds=rounds)
    multiple = (p.tp if trainer.sequence_parallel else 1) * (trainer.fp8.row_multiple if trainer.fp8 else 1)
    packs = [pack(batch or IDLE, share=share, multiple=multiple * p.cp) for batch in every[p.dp_rank]]
    if p.cp > 1:
        packs = [part(one, bounds_of(one, p.cp, multiple, costs), p.cp_rank) for one in packs]
    return [placed(one).to(p.device) for one in packs]


class TokenAccumulator:
    """Columns of N tokens, each token written by the one replica that processed it, and sums over all micro-batches.

    Values stay on the device until they are gathered, so recording one never synchronizes.
    """

    def __init__(self, num_tokens: int, parallel: Parallel) -> None:
        self._parallel = parallel
        self._num_tokens = num_tokens
        self._columns: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}

    def note(self, rows: Tensor, **columns: Tensor) -> None:
        """Record values [T] of the tokens at these rows. A later pass overwrites them."""
        for name, values in {"seen": torch.ones(len(rows), device=rows.device), **columns}.items():
            column = self._columns.setdefault(name, self._zeros())
            column[rows] = values.detach().to(column)

    def add(self, name: str, value: Tensor | float) -> None:
        """Add to a sum."""
        self._totals[name] = self._totals.get(name, torch.zeros(())) + torch.as_tensor(value).detach()

    @classmethod
    def joined(cls, parts: Sequence[TokenAccumulator], factors: Sequence[float]) -> TokenAccumulator:
        """Return the columns of several parts of a batch in order, and the sums of their sums; the losses in them are
        multiplied by a factor for each part."""
        whole = cls(sum(one._num_tokens for one in parts), parts[0]._parallel)
        for name in {name for one in parts for name in one._columns}:
            whole._columns[name] = torch.cat([one._columns.get(name, one._zeros()) for one in parts])
        for one, factor in zip(parts, factors, strict=True):
            for name, total in one._totals.items():
                whole.add(name, total * factor if name == "loss" else total)
        return whole

    def gather(
        self, names: tuple[str, ...], totals: tuple[str, ...] = ()
    ) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return the columns `names` and "seen" (bool), and the sums, on the CPU of every rank. Collective: every rank
        must pass the same names. Only one rank of each replica's last stage contributes."""
        names = ("seen", *names)
        columns = [self._columns.get(name, self._zeros()) for name in names]
        sums = [self._totals.get(name, torch.zeros(())).to(columns[0])[None] for name in totals]
        flat = torch.cat([*columns, *sums])
        if not self._parallel.counts:
            flat.zero_()
        if dist.get_world_size() > 1:
            dist.all_reduce(flat)
        flat = flat.cpu()
        found = dict(zip(names, flat[: len(names) * self._num_tokens].unflatten(0, (len(names), -1)), strict=True))
        found["seen"] = found["seen"] > 0
        return found, dict(zip(totals, flat[len(names) * self._num_tokens :].tolist(), strict=True))

    def _zeros(self) -> Tensor:
        return torch.zeros(self._num_tokens, dtype=torch.float64, device=self._parallel.device)
