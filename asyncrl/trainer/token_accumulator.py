"""Per-token results of the passes over a batch, gathered on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.parallel import Parallel


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
        whole = cls(sum(part._num_tokens for part in parts), parts[0]._parallel)
        for name in {name for part in parts for name in part._columns}:
            whole._columns[name] = torch.cat([part._columns.get(name, part._zeros()) for part in parts])
        for part, factor in zip(parts, factors, strict=True):
            for name, total in part._totals.items():
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
