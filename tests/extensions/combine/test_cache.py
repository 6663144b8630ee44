"""The same answer to the same question is scored once: by content, bounded, and never a failure."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.combine.cache import CachedReward, identity
from asyncrl.rewards import RewardInput, Score, build
from tests.rewards.doubles import Fixed, Later, answer


def length(one: RewardInput) -> Score:
    return Score(float(len(one.text)), parts={"x": 1.0})


async def ask(cached: CachedReward, *answers: RewardInput) -> list[Any]:
    """Return the results of all answers at once; nothing may reach the event loop's error handler."""

    async def one(asked: RewardInput) -> Any:
        result: Any = cached(asked)
        return result if isinstance(result, Score) else await result

    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    async with asyncio.timeout(60):
        found = await asyncio.gather(*(one(asked) for asked in answers), return_exceptions=True)
    assert unheard == []
    return found


@pytest.mark.parametrize("kind", [Fixed, Later])
def test_second_time_nothing_is_asked_and_the_score_is_the_same(kind: Any) -> None:
    async def main() -> None:
        reward = kind(length)
        cached = CachedReward(reward)
        first = await ask(cached, answer("ab", level=1))
        assert first == [Score(2.0, parts={"x": 1.0})]
        (second,) = await ask(cached, answer("ab", level=1))
        assert second == Score(2.0, (), {"x": 1.0})
        assert reward.asked == 1

    asyncio.run(main())


BASE = answer("a", "b", level=1)


@pytest.mark.parametrize(
    "other",
    [
        answer("a", "c", level=1),
        answer("x", "b", level=1),
        answer("b", level=1),
        answer("ab", level=1),
        answer("a", "b", level=2),
        answer("a", "b", level=1.0),
        answer("a", "b", level="1"),
        answer("a", "b", level=1, more=None),
        answer("a", "b", level=1, messages=[{"role": "user", "content": "?"}]),
        replace(BASE, text="c"),
    ],
)
def test_anything_that_differs_is_another_question(other: RewardInput) -> None:
    assert identity(other) != identity(BASE)


def test_order_of_fields_and_the_trajectory_do_not_matter() -> None:
    one, other = answer("a", x=1, y=[2]), answer("a", y=[2], x=1)
    assert identity(one) == identity(other) == identity(replace(one, trajectory=answer("a", "b").trajectory))


def test_question_that_cannot_be_encoded_is_scored_each_time() -> None:
    async def main() -> None:
        reward = Fixed(length)
        for value in (object(), 2**70):
            assert identity(answer("a", odd=value)) is None
            await ask(CachedReward(reward), answer("a", odd=value), answer("a", odd=value))
        assert reward.asked == 4

    asyncio.run(main())


@pytest.mark.parametrize("kind", [Fixed, Later])
def test_whoever_changes_a_score_changes_no_other(kind: Any) -> None:
    async def main() -> None:
        cached = CachedReward(kind(length))
        for _ in range(3):
            one, other = await ask(cached, answer("ab"), answer("ab"))
            for score in (one, other):
                assert score.parts == {"x": 1.0}
                score.parts["x"] = 7.0
                score.parts["y"] = 8.0

    asyncio.run(main())


def test_least_recently_used_make_room() -> None:
    async def main() -> None:
        reward = Fixed(length)
        cached = CachedReward(reward, size=2)
        a, b, c = (answer(text) for text in "abc")
        await ask(cached, a, b, a, c)  # b goes
        assert reward.asked == 3
        await ask(cached, a, c)
        assert reward.asked == 3
        await ask(cached, b)
        assert reward.asked == 4

    asyncio.run(main())


def test_who_asks_while_the_same_is_asked_shares_it() -> None:
    async def main() -> None:
        reward = Later(length, until=asyncio.Event())
        cached = CachedReward(reward)
        asking = asyncio.ensure_future(ask(cached, *[answer("ab")] * 5, answer("c")))
        await reward.beginning.acquire()
        await reward.beginning.acquire()
        assert reward.until
        reward.until.set()
        found = await asking
        assert [score.reward for score in found] == [2.0] * 5 + [1.0]
        assert reward.begun == 2

    asyncio.run(main())


def test_failure_is_shared_by_those_who_wait_and_not_kept() -> None:
    async def main() -> None:
        reward = Later(EpisodeFailed("judge", "down"))
        cached = CachedReward(reward)
        found = await ask(cached, answer("a"), answer("a"))
        assert [type(one) for one in found] == [EpisodeFailed, EpisodeFailed]
        assert reward.begun == 1
        reward.says = length
        assert (await ask(cached, answer("a")))[0].reward == 1.0

    asyncio.run(main())


def test_sync_failure_is_not_kept_either() -> None:
    reward = Fixed(EpisodeFailed("reward_error"))
    cached = CachedReward(reward)
    with pytest.raises(EpisodeFailed):
        cached(answer("a"))
    reward.says = length
    assert cached(answer("a")) == Score(1.0, parts={"x": 1.0})


def test_score_that_is_none_is_not_kept() -> None:
    reward = Fixed(float("nan"))
    cached = CachedReward(reward)
    for _ in range(2):
        with pytest.raises(EpisodeFailed):
            cached(answer("a"))
    assert reward.asked == 2


def test_first_to_stop_waiting_takes_nothing_the_last_ends_it() -> None:
    async def main() -> None:
        reward = Later(length, until=asyncio.Event())
        cached = CachedReward(reward)
        first, second = (asyncio.ensure_future(ask(cached, answer("a"))) for _ in range(2))
        await reward.beginning.acquire()
        first.cancel()
        await asyncio.wait([first])
        assert (reward.cancelled, second.done()) == (0, False)
        second.cancel()
        third = asyncio.ensure_future(ask(cached, answer("a")))  # while the other is being ended
        await asyncio.wait([second])
        assert reward.cancelled == 1
        assert reward.until
        reward.until.set()
        assert (await third)[0].reward == 1.0

    asyncio.run(main())


def test_rewards_in_threads_are_shared_too() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(one: RewardInput) -> float:
        entered.set()
        assert go_on.wait(10)
        return 3.0

    reward = Fixed(slow, inline=False)
    cached = CachedReward(reward)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(cached(answer("a")))) for _ in range(4)]
    threads[0].start()
    assert entered.wait(10)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert [score.reward for score in found] == [3.0] * 4
    assert reward.asked == 1


def test_thread_whose_forerunner_failed_asks_for_itself() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def slow(one: RewardInput) -> float:
        entered.set()
        assert go_on.wait(10)
        if reward.asked == 1:
            raise ValueError("the first")
        return 3.0

    reward = Fixed(slow, inline=False)
    cached = CachedReward(reward)
    found: list[Any] = []

    def first() -> None:
        with pytest.raises(ValueError, match="the first"):
            cached(answer("a"))

    threads = [threading.Thread(target=first), threading.Thread(target=lambda: found.append(cached(answer("a"))))]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert [score.reward for score in found] == [3.0]


def test_impure_reward_is_refused_and_closing_closes_it() -> None:
    with pytest.raises(ConfigError, match="not pure"):
        CachedReward(Fixed(1.0, pure=False))
    reward = Fixed(1.0)
    asyncio.run(CachedReward(reward).close())
    assert reward.closed
    assert build("cached", {"reward": {"use": "exact"}, "size": 10}).pure
