"""Supervised training on a rank: the batches of mode=sft, their loss, and that of rows that are held out.

Batch v consists of the rows at positions v B to (v + 1) B of the epochs, each of which has an order of its own. So a
version says what has been trained, whatever the layout, and a resumed run goes on behind it. Rows with the same prompt
are siblings of one group, which share it in a pack (trainer.share_prompts).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
from torch import Tensor

from asyncrl.algo.samples import build_samples
from asyncrl.algo.table import LossRows, build_table
from asyncrl.errors import ConfigError
from asyncrl.extension import TrainerHooks
from asyncrl.extensions.sft.rows import ChatRows, Part, Stored, Trained, trajectory_of
from asyncrl.schema import Batch, Group, Trajectory, encode, part_of
from asyncrl.trainer.batch_source import BatchSource

if TYPE_CHECKING:
    from asyncrl.config import Config
    from asyncrl.trainer.policy import Policy

MEANING = {
    "rows": "the digest of the rows of task.train_file and task.eval_file",
    "batch": "rollout.batch_groups",
    "seed": "run.seed",
}
"""What gives versions their meaning, which a resumed run must have in common with the one that wrote the checkpoint."""
NOTHING_GENERATED = {"time/engine_busy": 0.0, "tokens/generated": 0.0}
"""Figures of a rollout process that a step has."""


class RowOrder:
    """The order of the rows: which are in the batch of a version."""

    def __init__(self, first: int, last: int, batch: int, seed: int, epochs: int | None) -> None:
        """The rows from `first` to before `last` are trained, `batch` of them in a step."""
        self._first, self._count, self._batch, self._seed = first, last - first, batch, seed
        self._end = None if epochs is None else epochs * self._count

    @property
    def steps(self) -> int | None:
        """Number of batches; None if there is no last one."""
        return None if self._end is None else -(-self._end // self._batch)

    def rows(self, version: int) -> list[int]:
        """Return the rows of a batch. The last one may be smaller."""
        start = version * self._batch
        end = start + self._batch if self._end is None else min(start + self._batch, self._end)
        return [self._epoch(place // self._count)[place % self._count] for place in range(start, end)]

    def epochs(self, version: int) -> float:
        """Return how many times every row has been trained at this version."""
        done = version * self._batch
        return (done if self._end is None else min(done, self._end)) / self._count

    @lru_cache(maxsize=2)  # noqa: B019  of one object, which lives as long as the process
    def _epoch(self, epoch: int) -> list[int]:
        order = list(range(self._first, self._first + self._count))
        random.Random(f"{self._seed} {epoch}").shuffle(order)
        return order


class Conversations:
    """The tokens of rows."""

    def __init__(self, config: Config, policy: Policy, rows: ChatRows) -> None:
        self._rows, self._trained = rows, Trained(policy.folder, config)
        self._task = config.task
        self._longest = int(config.engine.server_args.get("context_length") or policy.hf["max_position_embeddings"])
        self._known = Stored(list[Part])

    def read(self, numbers: range) -> None:
        """Tokenize these rows, which follow those before. Raises ConfigError for what the model cannot learn from."""
        for _ in range(len(self._known), numbers.start):
            self._known.append([])  # rows to evaluate that eval.questions leaves out
        for number in numbers:
            self._known.append(self._of_row(number))

    def groups(self, numbers: list[int], version: int) -> list[Group]:
        """Return these rows as groups of siblings with the same prompt, in the order of the first of each."""
        siblings: dict[tuple[int, ...], list[Trajectory]] = {}
        for number in numbers:
            parts = self._known[number]
            siblings.setdefault(tuple(parts[0].observation), []).append(trajectory_of(parts, version))
        return [
            Group(f"v{version:06d}-{slot}", slot, list(prompt), trajectories, self._task.name)
            for slot, (prompt, trajectories) in enumerate(siblings.items())
        ]

    def _of_row(self, number: int) -> list[Part]:
        where = self._rows.named(number)
        if texts := self._rows.rendered(number):
            parts = self._trained.of_rendered(texts, where)
        else:
            parts = self._trained.parts(*self._rows.conversation(number), where)
        length = longest = 0
        for part in parts:
            length = len(part.observation) + len(part.written) + (0 if part.begins else length)
            longest = max(longest, length)
        if longest > self._longest:
            remedy = f"{where} has {longest} tokens, but the model {self._longest} positions: shorten or remove it."
            field = "task.train_file" if self._task.train_file else "task.dataset"
            raise ConfigError(field, self._task.train_file or self._task.dataset, remedy)
        return parts


class SftBatches(BatchSource):
    """The batches of mode=sft, up to the version `end`. `groups` makes groups of the rows of a version."""

    def __init__(self, order: RowOrder, groups: Callable[[list[int], int], list[Group]], end: int) -> None:
        self._order, self._groups = order, groups
        self.end = end

    def batch(self, version: int, part: int = 0, parts: int = 1, *, interrupt: Callable[[], bool]) -> bytes:
        """Return the batch of this version, or a part of it."""
        rows = self._order.rows(version)
        groups = self._groups(rows, version)
        start, end = part_of(len(groups), part, parts := min(parts, len(groups)))
        last = part + 1 == parts
        figures = {**NOTHING_GENERATED, "samples/generated": float(len(rows))}
        return encode(Batch(version, groups[start:end], figures if last else {}, last))


class Supervised(TrainerHooks):
    """Supervised training on one rank."""

    signal, scored = True, False

    def __init__(self, settings: Any, policy: Policy) -> None:
        """Read the rows. `settings` are those of extension.py. Raises ConfigError."""
        config = policy.config
        self._policy, self._every = policy, config.eval.every
        self._rows = ChatRows(config.task)
        size = self._rows.size
        own = self._rows.held_out
        self._held = range(min(own or size, config.eval.questions))
        first = own or len(self._held)
        if first >= size:
            remedy = f"{size} rows would leave none for training: lower it, or set task.eval_file."
            raise ConfigError("eval.questions", config.eval.questions, remedy)
        batch, seed = config.rollout.batch_groups, config.run.seed
        self._order = RowOrder(first, size, batch, seed, settings.epochs)
        self._state = {"rows": self._rows.digest(), "batch": batch, "seed": seed}
        self._end = min(self._order.steps or config.run.max_steps, config.run.max_steps)
        self._before: dict[str, float] = {}
        self._conversations = Conversations(config, policy, self._rows)
        self._conversations.read(self._held)
        if policy.parallel.is_first:  # which alone makes batches
            self._conversations.read(range(first, size))

    def batches(self, client: Callable[[], BatchSource]) -> BatchSource:
        """Return the batches."""
        return SftBatches(self._order, self._conversations.groups, self._end)

    def loss(self, losses: Tensor, logprobs: Tensor, rows: LossRows) -> Tensor:
        """Return the negative log-likelihood of each token, in place of the losses."""
        return -logprobs

    def before_update(self, batch: Batch) -> list[Group]:
        """Measure the rows that are held out once, before the first step. Adds nothing."""
        if batch.version == 0 and self._held and not self._before:
            self._before = {f"{name}/before": value for name, value in self.held_out(0).items()}
        return []

    def after_update(self, version: int) -> dict[str, float]:
        """Return the epoch, and the loss of the rows that are held out, if it is due."""
        found = {"sft/epoch": self._order.epochs(version), **(self._before if version == 1 else {})}
        due = version == self._end or (self._every and version % self._every == 0)
        return {**found, **(self.held_out(version) if due and self._held else {})}

    def held_out(self, version: int) -> dict[str, float]:
        """Return the mean loss of the tokens of the rows that are held out. Collective."""
        groups = self._conversations.groups(list(self._held), version)
        samples = build_samples(groups, self._policy.network.transformation.model_of)
        logprobs = self._policy.score_at(1.0, samples, build_table(groups, version))
        return {"sft/held_out": -float(logprobs.mean())}

    def state(self) -> bytes:
        """Return what gives versions their meaning."""
        return msgspec.json.encode(self._state)

    def restore(self, state: bytes) -> None:
        """Check that a resumed run trains the same batches. Raises ValueError."""
        then = msgspec.json.decode(state, type=dict[str, str | int])
        for name, what in MEANING.items():
            if then.get(name) != (now := self._state[name]):
                problem = f"{what} was {then.get(name)}, and is {now}"
                raise ValueError(f"its next batch would not be the next one any more, because {problem}")
