"""Samples -> one row of tokens in which every prompt stands once.

The completions of a group attend to their one shared prompt, and the beginning that all prompts have in common (system
message, worked examples) stands once for the whole pack. The values are those of separate sequences; the work is a
fraction of it. A pack of two groups (root R, prompt tails P, completions a b c):

    row         R R R | P1 P1 a a b b b | P2 c c d d
    unit          root |     unit 0      |  unit 1
    attention   causal | own unit by tree, and all of the root

Hidden states become logits only at the rows that predict something: the last prompt token once for all siblings, and
every completion token but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.algo.samples import Sample

MIN_ROOT = 8  # a shorter common beginning is not worth a separate attention call


@dataclass(frozen=True)
class Pack:
    """N tokens in a row, U rows of logits, T trained tokens."""

    token_ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64, position within the token's own sequence
    root: int  # tokens 0..root-1 are shared by all units
    units: Tensor  # [G, n] int64, row index of each unit's tokens, padded with 0
    visible: Tensor  # [G, 1, n, root + n] bool, what a unit's token attends to
    places: Tensor  # [N - root] int64, where token root + i is within units.flatten()
    logit_rows: Tensor  # [U] int64, row index of each hidden state that becomes logits
    row_of_target: Tensor  # [T] int64 into logit_rows
    targets: Tensor  # [T] int64
    table_rows: Tensor  # [T] int64, where the table of the batch holds what is known of them
    keys: Tensor | None = None  # [N] int64 on the host, each token's place in algo/routes.py, or -1

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.token_ids)

    def to(self, device: torch.device) -> Pack:
        """The same on another device."""
        moved: dict[str, Any] = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in vars(self).items()}
        return Pack(**{**moved, "keys": self.keys})


class _Unit:
    """One prompt (without the root) and its completions, as rows of a pack."""

    def __init__(self, start: int, root: int, samples: Sequence[Sample]) -> None:
        self.start = start
        prompt = samples[0].prompt_ids
        self.token_ids = prompt[root:]
        self.positions = list(range(root, len(prompt)))
        self.prompt_len = len(self.token_ids)
        self.spans: list[tuple[int, int]] = []  # of the completions, within the unit
        for sample in samples:
            inputs = sample.token_ids[:-1]  # nothing is predicted from the last token
            begin = len(self.token_ids)
            self.token_ids = self.token_ids + inputs
            self.positions += range(len(prompt), len(prompt) + len(inputs))
            self.spans.append((begin, begin + len(inputs)))

    def visible(self) -> Tensor:
        """[n, n] bool: causal within the prompt and within a completion; completions see the prompt, not each other."""
        size, prompt = len(self.token_ids), self.prompt_len
        seen = torch.zeros(size, size, dtype=torch.bool)
        seen[:, :prompt] = True
        seen[:prompt, :prompt] = torch.ones(prompt, prompt, dtype=torch.bool).tril()
        for begin, end in self.spans:
            seen[begin:end, begin:end] = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
        return seen


def pack(groups: Sequence[Sequence[Sample]], *, share: bool = True, multiple: int = 1) -> Pack:
    """One pack of whole groups. `share` off gives every sample its own prompt, to compare with. The row is padded to a
    multiple of `multiple` tokens (sequence parallelism splits it evenly)."""
    prompts: list[Sequence[Sample]] = [group for group in groups if group]
    if not share:
        prompts = [[sample] for group in prompts for sample in group]
    root = _common_beginning([group[0].prompt_ids for group in prompts]) if share else 0
    units, start = [], root
    for group in prompts:
        units.append(_Unit(start, root, group))
        start += len(units[-1].token_ids)
    padding = -start % multiple

    token_ids = (
        (prompts[0][0].prompt_ids[:root] if root else [])
        + [t for unit in units for t in unit.token_ids]
        + [0] * padding
    )
    positions = [*range(root), *(p for unit in units for p in unit.positions), *[0] * padding]
    index, visible, places = _attention(units, root, padding)
    rows, row_of_target, targets, table_rows = _targets(prompts, units)
    return Pack(
        torch.tensor(token_ids),
        torch.tensor(positions),
        root,
        index,
        visible,
        places,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(row_of_target, dtype=torch.int64),
        torch.tensor(targets, dtype=torch.int64),
        torch.tensor(table_rows, dtype=torch.int64),
        _keys(prompts, root, padding),
    )


def _keys(prompts: list[Sequence[Sample]], root: int, padding: int) -> Tensor | None:
    """Each token's key, in the order of the row; None where samples have none (routing is not replayed)."""
    parts = [] if not root or prompts[0][0].keys is None else [prompts[0][0].keys[:root]]
    for group in prompts:
        for number, sample in enumerate(group):
            if sample.keys is None:
                return None
            parts.append(sample.keys[len(sample.prompt_ids) if number else root :])
    return torch.cat([*parts, torch.full((padding,), -1)])


def _attention(units: list[_Unit], root: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Units as one padded batch: row indices, visibility, and the way back. Padding tokens attend to the first key."""
    longest = max(len(unit.token_ids) for unit in units)
    spare = -(-padding // longest)  # whole units that hold the row's own padding
    index = torch.zeros(len(units) + spare, longest, dtype=torch.int64)
    visible = torch.zeros(len(units) + spare, 1, longest, root + longest, dtype=torch.bool)
    visible[:, :, :, 0] = True  # a query that sees nothing would be NaN
    places = []
    for number, unit in enumerate(units):
        size = len(unit.token_ids)
        index[number, :size] = torch.arange(unit.start, unit.start + size)
        visible[number, 0, :size, :root] = True
        visible[number, 0, :size, root : root + size] = unit.visible()
        places.append(torch.arange(size) + number * longest)
    places.append(torch.arange(padding) + len(units) * longest)
    return index, visible, torch.cat(places)


def _targets(prompts: list[Sequence[Sample]], units: list[_Unit]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Which hidden states become logits; which of them predicts each trained token, the token, its row in the table."""
    rows: list[int] = []
    row_of_target: list[int] = []
    targets: list[int] = []
    table_rows: list[int] = []
    for group, unit in zip(prompts, units, strict=True):
        last_of_prompt = len(rows)
        rows.append(unit.start + unit.prompt_len - 1)
        for sample, (begin, _) in zip(group, unit.spans, strict=True):
            for t, chosen in enumerate(sample.mask):
                if not chosen:
                    continue
                if t == 0:
                    row_of_target.append(last_of_prompt)
                else:
                    row_of_target.append(len(rows))
                    rows.append(unit.start + begin + t - 1)
                targets.append(sample.token_ids[t])
            table_rows += range(sample.first_row, sample.first_row + sample.num_trained)
    return rows, row_of_target, targets, table_rows


def _common_beginning(prompts: list[list[int]]) -> int:
    """Length of the longest beginning that all prompts share, leaving each at least one token of its own."""
    if len(prompts) < 2:
        return 0
    shortest = min(len(prompt) for prompt in prompts) - 1
    first = prompts[0]
    length = next((i for i in range(shortest) if any(prompt[i] != first[i] for prompt in prompts)), shortest)
    return length if length >= MIN_ROOT else 0


def packed_size(group: Sequence[Sample], share: bool = True) -> int:
    """Tokens that a group adds to a pack (its root counted in full: an upper limit)."""
    completions = sum(max(0, len(sample.token_ids) - 1) for sample in group)
    return completions + len(group[0].prompt_ids) * (1 if share else len(group))


def micro_batches(groups: list[list[Sample]], limit: int, share: bool = True) -> list[list[list[Sample]]]:
    """Groups in packs of at most `limit` tokens, filled in order; a larger group goes alone, never split."""
    packs: list[list[list[Sample]]] = []
    room = 0
    for group in groups:
        size = packed_size(group, share)
        if size > room or not packs:
            packs.append([])
            room = limit
        packs[-1].append(group)
        room -= size
    return packs


def spread(groups: list[list[Sample]], ranks: int, share: bool = True) -> list[list[list[Sample]]]:
    """Groups for each data-parallel rank, balanced by tokens: largest first, to the rank with the least."""
    shares: list[list[list[Sample]]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for group in sorted(groups, key=lambda group: packed_size(group, share), reverse=True):
        least = load.index(min(load))
        shares[least].append(group)
        load[least] += packed_size(group, share)
    return shares
