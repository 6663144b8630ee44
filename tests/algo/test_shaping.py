"""Shaped rewards by hand; what is off changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from asyncrl.algo.shaping import EPSILON, shaped, trainable
from asyncrl.algo.table import TokenTable
from tests.algo.tables import few, make, tables
from tests.fakes import tiny_config

LENGTHS, REWARDS = [2, 6, 7, 8, 10, 12], [1.0, 1.0, 0.0, 1.0, -3.0, 0.5]
TABLE = make(LENGTHS, REWARDS)
OFF = tiny_config().algo.shaping


def rewards(table: TokenTable = TABLE, **settings) -> list[float]:
    return shaped(table, OFF.model_copy(update=settings), longest=10).tolist()


@few
@given(tables())
def test_nothing_set_changes_nothing(table: TokenTable) -> None:
    assert shaped(table, OFF, longest=4).tolist() == table.reward.tolist()
    assert trainable(table, OFF).tolist() == [True] * table.num_tokens


def test_overlong_penalty_grows_in_the_buffer_and_then_stays() -> None:
    # limit 10, buffer 4: nothing up to 6 tokens, then a quarter for each
    assert rewards(overlong_buffer=4) == [1.0, 1.0, -0.25, 0.5, -4.0, -0.5]
    assert rewards(overlong_buffer=4, overlong_penalty=2.0) == [1.0, 1.0, -0.5, 0.0, -5.0, -1.5]
    assert rewards(overlong_buffer=10)[0] == 0.8  # the whole answer is buffer


def test_length_penalty_is_linear_in_tokens() -> None:
    assert rewards(length_penalty=0.5) == pytest.approx([0.9, 0.7, -0.35, 0.6, -3.5, -0.1])


def test_clip_cuts_at_both_ends() -> None:
    assert rewards(clip=0.75) == [0.75, 0.75, 0.0, 0.75, -0.75, 0.5]


def test_normalised_rewards_of_a_batch_by_hand() -> None:
    table = make([1, 1, 1, 0], [0.0, 0.0, 2.0, 2.0], [0, 0, 1, 1])  # mean 1, unbiased deviation sqrt(4/3)
    one = 1 / (math.sqrt(4 / 3) + EPSILON)
    assert rewards(table, normalize=True) == pytest.approx([-one, -one, one, one])


@pytest.mark.parametrize("equal", [[], [3.0], [0.1] * 7])
def test_equal_rewards_are_normalised_to_exactly_nothing(equal: list[float]) -> None:
    assert rewards(make([1] * len(equal), equal), normalize=True) == [0.0] * len(equal)


def test_penalties_come_before_clip_and_normalisation() -> None:
    settings = {"overlong_buffer": 4, "overlong_penalty": 1.0, "length_penalty": 0.5, "clip": 1.0}
    clipped = [0.9, 0.7, -0.6, 0.1, -1.0, -1.0]  # 0.9, 0.7, -0.25 - 0.35, 0.5 - 0.4, -4.5, -0.5 - 0.6
    assert rewards(**settings) == pytest.approx(clipped)
    again = rewards(make(LENGTHS, clipped), normalize=True)
    assert rewards(**settings, normalize=True) == pytest.approx(again)


def test_truncated_answers_are_left_out_whole() -> None:
    table = make([2, 1, 0, 3], [0.0] * 4, truncated=[True, False, True, False])
    masked = OFF.model_copy(update={"mask_truncated": True})
    assert trainable(table, masked).tolist() == [
        False,
        False,
        True,
        True,
        True,
        True,
    ]


def test_rewards_of_turns_and_tokens_stay_as_they_are() -> None:
    table = make([2, 1], [1.0, 0.0], token_reward=[0.5, 2.0, 0.0])
    assert rewards(table, clip=0.25) == [0.25, 0.0]


def test_episode_goes_by_its_longest_answer_and_pays_for_all() -> None:
    table = make([12, 9], [1.0, 1.0], turn=[0] * 4 + [1] * 8 + [0] * 9)
    assert rewards(table, overlong_buffer=4) == [0.5, 0.25]  # 8 of 12, and 9
    assert rewards(table, length_penalty=1.0) == pytest.approx([1 - 1.2, 1 - 0.9])
    halves = replace(table, share=table.share.index_fill(0, torch.arange(4, 12), 0.5))
    assert rewards(halves, length_penalty=1.0) == pytest.approx([1 - 0.8, 1 - 0.9])
