"""Conversion of an agent's requests and completions into the turns of a trajectory, and the check of the result.

A completion continues the sample whose tokens so far are the longest prefix of the request. If there is none, it begins
a new sample. So an agent that only extends its context produces one sample, and one that edits it, or makes requests
for several agents, produces more. Nothing is tokenized again, and every generated token is trained once.

    request P          completion a     sample 1: P | a
    request P a o      completion b     sample 1: P | a o b
    request P a q      completion c     sample 2: P a q | c      (a branch: a is context here, not trained twice)
    request S          completion d     sample 3: S | d          (the context was reset)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.schema import Exchange, Trajectory, Turn


@dataclass
class _Sample:
    role: str
    ids: list[int]
    images: Sequence[str] = ()
    turns: list[Turn] = field(default_factory=list)


def link(prompt_ids: list[int], asked: Sequence[Exchange], prompt_images: Sequence[str] = ()) -> list[Turn]:
    """Return the turns of all requests, sample after sample; `asked` is in the order of the requests."""
    samples: list[_Sample] = []
    for one in asked:
        goes_on = [sample for sample in samples if sample.role == one.role and one.follows(sample.ids, sample.images)]
        if goes_on:
            sample = max(goes_on, key=lambda sample: len(sample.ids))
            new = list(one.images[len(sample.images) :])
            turn = Turn(one.context[len(sample.ids) :], one.completion, role=one.role, images=new)
        else:
            first = all(sample.role != one.role for sample in samples)
            follows = first and one.follows(prompt_ids, prompt_images)
            observation = one.context[len(prompt_ids) :] if follows else one.context
            new = list(one.images[len(prompt_images) :] if follows else one.images)
            turn = Turn(observation, one.completion, begins=not follows, role=one.role, images=new)
            samples.append(sample := _Sample(one.role, []))
        sample.turns.append(turn)
        sample.ids, sample.images = [*one.context, *one.completion.token_ids], one.images
    return [turn for sample in samples for turn in sample.turns]


def check(
    trajectory: Trajectory,
    prompt_ids: list[int],
    asked: Sequence[Exchange],
    prompt_images: Sequence[str] = (),
) -> None:
    """Check that engines generated every turn in exactly the context that the trajectory states, and each turn once.

    Raises ValueError otherwise.
    """
    if not trajectory.turns:
        raise ValueError("the trajectory has no turn")
    left = list(asked)
    for turns in trajectory.samples():
        begins = turns[0][1].begins
        ids, images = ([], []) if begins else (list(prompt_ids), list(prompt_images))
        for place, turn in turns:
            ids, images = [*ids, *turn.observation], [*images, *turn.images]
            found = next((one for one in left if one.completion is turn.completion), None)
            found = found or next((one for one in left if one.completion == turn.completion), None)
            if found is None:
                raise ValueError(f"turn {place} holds tokens that no engine wrote for it, or that another turn holds")
            if found.context != ids:
                raise ValueError(f"turn {place} follows other tokens than the engine read ({_difference(ids, found)})")
            if found.images != images:
                raise ValueError(f"turn {place} follows other images than the engine read: Turn.images lists them")
            left.remove(found)
            ids += turn.completion.token_ids


def _difference(ids: list[int], found: Exchange) -> str:
    same = next((i for i, (a, b) in enumerate(zip(ids, found.context, strict=False)) if a != b), None)
    if same is None:
        return f"{len(ids)} in the place of {len(found.context)}"
    return f"token {same} is {ids[same]} in the place of {found.context[same]}"
