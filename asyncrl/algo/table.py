"""The token table of a batch: one row for every token that the policy wrote, in the same order on every rank.

    row        0 1 2 | 3 4 | 5 6 7 8 |           sample 3 wrote nothing: it has no row, but counts as a sample
    sample     0 0 0   1 1   2 2 2 2
    episode    sample -> episode: what one role wrote in one trajectory, usually a single sample
    group      episode -> group, so that siblings are found by number and never by position; each role has its own
    turn       its index in the trajectory; its parent turn and its context: algo/turns.py

Stages of a step (trainer/policy.py):

    TokenTable       a batch; then with the log-probabilities and values that the algorithm needs
    TrainingTable    with advantages, and which tokens are trained
    LossRows         the rows of a micro-batch, with every column that a loss may use

Packs refer to tokens by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from asyncrl.algo.advantage import GroupStatistics
from asyncrl.algo.branches import TurnTable, turn_table
from asyncrl.algo.turns import TurnContext, turn_contexts
from asyncrl.schema import Group, Turn

T = TypeVar("T", bound="TokenTable")


@dataclass(frozen=True)
class TokenTable:
    """N tokens of S samples of E episodes of G groups. Values are float64, because small differences between them
    matter."""

    sample: Tensor  # [N] int64, ascending
    turn: Tensor  # [N] int64, its index in the trajectory, ascending within an episode
    behaviour: Tensor  # [N] the engine's log-probabilities
    lag: Tensor  # [N] int64, version in training minus the version that wrote the token
    episode: Tensor  # [S] int64, ascending
    group: Tensor  # [E] int64
    reward: Tensor  # [E] of the whole episode
    truncated: Tensor  # [E] bool, ended by length
    token_reward: Tensor  # [N] rewards of single tokens, and of turns at their last token; in addition to `reward`
    parent: Tensor  # [N] int64, index of the parent turn, of the same role; -1: none
    share: Tensor  # [N] 1, or its turn's fraction of the episode if that has several branches
    context: Tensor  # [N] int64, equal for turns of a group that were written after the same tokens
    state: Tensor  # [N] int64, equal for turns of a group in one environment state (if unnamed: one context)
    # if the algorithm needs them
    proximal: Tensor | None = None  # [N] log-probabilities of the policy that the step starts from
    reference: Tensor | None = None  # [N] of the reference model
    teacher: Tensor | None = None  # [N] of the teacher
    values: Tensor | None = None  # [N] of the critic, before the update

    @property
    def num_tokens(self) -> int:
        """Number of tokens, N."""
        return len(self.sample)

    @property
    def num_samples(self) -> int:
        """Number of samples, S."""
        return len(self.episode)

    @property
    def num_episodes(self) -> int:
        """Number of episodes, E."""
        return len(self.group)

    @property
    def num_groups(self) -> int:
        """Number of groups, G."""
        return int(self.group.max()) + 1 if len(self.group) else 0

    def lengths(self) -> Tensor:
        """Return the number of trained tokens of each sample, [S]."""
        return self.sum_per_sample(torch.ones_like(self.sample))  # bincount would make the host wait for a GPU

    @property
    def owner(self) -> Tensor:
        """Episode of each token, [N]."""
        return self.episode[self.sample]

    def per_token(self, of_episodes: Tensor) -> Tensor:
        """Expand values of episodes to their tokens, [E] -> [N]."""
        return of_episodes[self.owner]

    def sum_per_sample(self, of_tokens: Tensor) -> Tensor:
        """Sum over the tokens of each sample, [N] -> [S]."""
        return of_tokens.new_zeros(self.num_samples).index_add(0, self.sample, of_tokens)

    def sum_per_episode(self, of_tokens: Tensor) -> Tensor:
        """Sum over the tokens of each episode, [N] -> [E]."""
        return of_tokens.new_zeros(self.num_episodes).index_add(0, self.owner, of_tokens)

    @cached_property
    def turns(self) -> TurnTable:
        """The turns."""
        return turn_table(self)

    @cached_property
    def groups(self) -> GroupStatistics:
        """Rewards of the episodes, with the statistics of each one's group."""
        rewards = self.reward + self.sum_per_episode(self.share * self.token_reward)
        return GroupStatistics(rewards, self.group, self.owner)

    def column(self, name: str) -> Tensor:
        """Return a column that the algorithm needs."""
        column: Tensor | None = getattr(self, name)
        assert column is not None, name
        return column

    def rows(self: T, where: Tensor, dtype: torch.dtype) -> T:
        """Return the rows [T] of a micro-batch, with floating-point columns as `dtype`. Columns of samples and episodes
        stay complete, and sample numbers stay unchanged."""

        def chosen(name: str, column: Tensor) -> Tensor:
            column = column if name in WHOLE else column.index_select(0, where)
            return column.to(dtype) if column.is_floating_point() else column

        return self._with_columns(chosen)

    def to(self: T, device: torch.device) -> T:
        """Return the table on another device."""
        return self._with_columns(lambda _, column: column.to(device, non_blocking=device.type == "cuda"))

    def _with_columns(self: T, change: Callable[[str, Tensor], Tensor]) -> T:
        changed: dict[str, Any] = {name: x if x is None else change(name, x) for name, x in self.columns().items()}
        return type(self)(**changed)

    def trained(self, advantages: Tensor, keep: Tensor | None = None) -> TrainingTable:
        """Return the table with advantages, and with the tokens that are trained, by default all."""
        columns: dict[str, Any] = self.columns()
        keep = torch.ones(self.num_tokens, dtype=torch.bool) if keep is None else keep
        return TrainingTable(**columns, advantages=advantages, keep=keep, weights=torch.zeros_like(advantages))

    def columns(self) -> dict[str, Tensor | None]:
        """Return all columns by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class TrainingTable(TokenTable):
    """A table whose tokens have advantages."""

    advantages: Tensor  # [N]
    keep: Tensor  # [N] bool, False if a decision over the whole batch leaves the token out
    weights: Tensor  # [N] each token's share of the loss, including the optimizer step's denominator; 0 before it

    def with_proximal(self, proximal: Tensor) -> LossRows:
        """Return the table with the proximal policy's log-probabilities."""
        columns: dict[str, Any] = self.columns()
        return LossRows(**{**columns, "proximal": proximal})


@dataclass(frozen=True, kw_only=True)
class LossRows(TrainingTable):
    """The rows of a micro-batch, with all that a loss may use."""

    proximal: Tensor  # of a single optimizer step: the log-probabilities of the policy in training, detached


WHOLE = ("episode", "group", "reward", "truncated")
"""Columns of samples and episodes."""


def build_table(groups: Sequence[Group], version: int) -> TokenTable:
    """Build the table of the groups that version `version` is trained on. The order is groups, then their trajectories,
    their roles, and the samples of each role (Trajectory.samples)."""
    episodes = _episodes(groups)
    samples = [(one, placed) for one in episodes for placed in one.samples]
    turns = [(row, one, place, turn) for row, (one, placed) in enumerate(samples) for place, turn in placed]
    written = [turn.completion for *_, turn in turns]
    places = [(one.group, one.places[place]) for _, one, place, _ in turns]
    lengths = torch.tensor([len(one.token_ids) for one in written], dtype=torch.int64)

    def of_tokens(of_turns: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(of_turns, dtype=dtype).repeat_interleave(lengths)

    lag = [version - span.version for one in written for span in one.versions for _ in range(span.start, span.end)]
    return TokenTable(
        sample=of_tokens([row for row, *_ in turns]),
        turn=of_tokens([place for _, _, place, _ in turns]),
        behaviour=torch.tensor([logprob for one in written for logprob in one.logprobs], dtype=torch.float64),
        lag=torch.tensor(lag, dtype=torch.int64),
        episode=torch.tensor([number for number, one in enumerate(episodes) for _ in one.samples], dtype=torch.int64),
        group=torch.tensor([one.group for one in episodes], dtype=torch.int64),
        reward=torch.tensor([one.reward for one in episodes], dtype=torch.float64),
        truncated=torch.tensor([one.truncated for one in episodes], dtype=torch.bool),
        token_reward=torch.tensor([r for *_, turn in turns for r in _turn_rewards(turn)], dtype=torch.float64),
        parent=of_tokens([place.parent for _, place in places]),
        share=of_tokens([place.share for _, place in places], torch.float64),
        context=of_tokens(_numbered([(group, place.context) for group, place in places])),
        state=of_tokens(_numbered([(group, place.state) for group, place in places])),
        teacher=_teacher([turn for *_, turn in turns], int(lengths.sum())),
    )


def _numbered(keys: Sequence[object]) -> list[int]:
    """Number the different keys in the order in which they first occur, and return the number of each."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


@dataclass(frozen=True)
class _Episode:
    group: int
    samples: list[list[tuple[int, Turn]]]
    places: list[TurnContext]  # of all turns of the trajectory
    reward: float
    truncated: bool


def _episodes(groups: Sequence[Group]) -> list[_Episode]:
    """Return what each role wrote in each trajectory. All roles share the trajectory's reward. The reward of a turn
    belongs to its role alone (and is added to the episode's if the turn wrote nothing, because no token can hold
    it)."""
    found, numbers = [], dict[tuple[int, str], int]()
    for number, trajectory, prompt_ids in (
        (n, t, group.prompt_ids) for n, group in enumerate(groups) for t in group.trajectories
    ):
        of_turns, samples = turn_contexts(trajectory, prompt_ids), trajectory.samples()
        for role, placed in trajectory.by_role().items():
            own = numbers.setdefault((number, role), len(numbers))
            silent = sum(of_turns[i].share * turn.reward for i, turn in placed if not turn.completion.token_ids)
            inner = {of_turns[i].after for i, _ in placed}
            cut = any(turn.completion.finish_reason == "length" for i, turn in placed if i not in inner)
            mine = [one for one in samples if one[0][1].role == role]
            found.append(_Episode(own, mine, of_turns, (trajectory.reward or 0.0) + silent, cut))
    return found


def _teacher(turns: Sequence[Turn], tokens: int) -> Tensor | None:
    """Return the teacher's log-probabilities, [N], or None if no teacher was asked. Raises ValueError if only some
    tokens were scored."""
    found = [logprob for turn in turns for logprob in turn.teacher]
    if not found:
        return None
    if len(found) != tokens:
        raise ValueError(f"the teacher has scored {len(found)} of the batch's {tokens} tokens")
    return torch.tensor(found, dtype=torch.float64)


def _turn_rewards(turn: Turn) -> list[float]:
    """Return one reward for each token of a turn: its own, plus the turn's at the last token."""
    length = len(turn.completion.token_ids)
    rewards = list(turn.token_rewards) or [0.0] * length
    if length:
        rewards[-1] += turn.reward
    return rewards
