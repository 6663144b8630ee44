"""Groups, as they came over the wire, into trainable samples with their advantages and their share of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.algo.advantage import ADVANTAGES
from asyncrl.types import Group, Trajectory


@dataclass(frozen=True)
class Sample:
    """One token sequence after a prompt. `mask` marks what the policy wrote; only that is trained.

    Example: a tool's answer [50, 51] between two completions [7, 8] and [9]:
        token_ids [7, 8, 50, 51, 9]   mask [1, 1, 0, 0, 1]   logprobs [-.1, -.2, 0, 0, -.3]
    """

    prompt_ids: list[int]  # [P]
    token_ids: list[int]  # [T]
    mask: list[bool]  # [T]
    logprobs: list[float]  # [T] the engine's; 0 where mask is False
    advantage: float
    token_weight: float  # every trained token's share of the loss: the step's one denominator is inside

    @property
    def num_trained(self) -> int:
        """Tokens under the mask."""
        return sum(self.mask)


def build_samples(groups: list[Group], *, advantage: str, aggregation: str, longest: int) -> list[list[Sample]]:
    """Per group, its samples. The denominator counts every token or sequence of the batch, trained or not.

    token:    loss = sum over tokens / N_tokens
    sequence: loss = sum over sequences of the mean over their tokens / N_sequences
    constant: loss = sum over tokens / (N_sequences * longest)      (Dr. GRPO, arXiv 2503.20783)
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    num_tokens = sum(trajectory.num_tokens for trajectory in trajectories)
    num_sequences = sum(trajectory.num_tokens > 0 for trajectory in trajectories)

    def token_weight(trajectory: Trajectory) -> float:
        if aggregation == "token":
            return 1.0 / max(1, num_tokens)
        return 1.0 / max(1, num_sequences) / (max(1, trajectory.num_tokens) if aggregation == "sequence" else longest)

    return [
        [
            _sample(group.prompt_ids, trajectory, value, token_weight(trajectory))
            for trajectory, value in zip(
                group.trajectories, ADVANTAGES[advantage]([t.reward for t in group.trajectories]), strict=True
            )
        ]
        for group in groups
    ]


def _sample(prompt_ids: list[int], trajectory: Trajectory, advantage: float, token_weight: float) -> Sample:
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    for turn in trajectory.turns:
        token_ids += [*turn.observation, *turn.completion.token_ids]
        mask += [False] * len(turn.observation) + [True] * len(turn.completion.token_ids)
        logprobs += [0.0] * len(turn.observation) + turn.completion.logprobs
    return Sample(prompt_ids, token_ids, mask, logprobs, advantage, token_weight)
