"""math_verify in processes of its own: what it finds equal, what it does not say in time, and whose fault that is.

The processes start once for all tests here: importing sympy takes a second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.mathematics.math_reward import MathReward
from asyncrl.rewards import Score
from tests.rewards.doubles import answer


class Site:
    def __init__(self, runner: asyncio.Runner, reward: MathReward) -> None:
        self.runner, self.reward = runner, reward

    def score(self, text: str, gold: Any) -> Score:
        return self.runner.run(asyncio.wait_for(self.reward(answer(text, answer=gold)), 60))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with asyncio.Runner() as runner:
        reward = MathReward(workers=1, seconds=0.5)
        yield Site(runner, reward)
        runner.run(reward.close())


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        (r"so \boxed{0.5}", "1/2", 1),
        (r"so $\frac{2}{4}$", r"\frac{1}{2}", 1),
        ("the answer is 1,000", 1000, 1),
        (r"It costs \boxed{\$18.90}.", r"\$18.90", 1),
        (r"\boxed{1+x}", "x+1", 1),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1),
        (r"$x = \sqrt{8}$", r"2\sqrt{2}", 1),
        (r"first \boxed{1}, but no: the final answer is $\boxed{2}$", "2", 1),
        (r"\boxed{0.51}", "1/2", 0),
        (r"\boxed{1}, \boxed{2} or \boxed{3}", "2", 0),
        (r"\boxed{x+2}", "x+1", 0),
    ],
)
def test_equal_is_what_is_mathematically_the_same(site: Site, text: str, gold: Any, reward: float) -> None:
    assert site.score(text, gold) == Score(reward, parts={"math/timeout": 0.0, "math/error": 0.0, "math/unparsed": 0.0})


def test_answer_without_mathematics_is_wrong_and_counted(site: Site) -> None:
    score = site.score("I cannot say", "2")
    assert (score.reward, score.parts["math/unparsed"]) == (0.0, 1.0)


@pytest.mark.parametrize("gold", ["", "?", r"\frac{1}{0}"])
def test_reference_that_is_no_mathematics_is_the_records_fault(site: Site, gold: str) -> None:
    with pytest.raises(EpisodeFailed, match=r"cannot use .* as a reference") as caught:
        site.score("2", gold)
    assert caught.value.reason == "reward_error"


def test_answer_that_math_verify_raises_at_is_wrong_and_counted(site: Site) -> None:
    """Python refuses to read an integer of more than 4300 digits."""
    score = site.score("1" * 5000, "2")
    assert (score.reward, score.parts["math/error"]) == (0.0, 1.0)


@pytest.mark.integration
def test_endless_answer_scores_0_and_the_loop_goes_on(site: Site) -> None:
    """A power tower is worked out in C, where no signal handler of Python's would be heard."""

    async def main() -> tuple[Score, int]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0.01)
                beats += 1

        heart = asyncio.create_task(beat())
        score = await asyncio.wait_for(site.reward(answer(r"\boxed{9^{9^{9^{9}}}}", answer="4")), 60)
        heart.cancel()
        return score, beats

    score, beats = site.runner.run(main())
    assert (score.reward, score.parts["math/timeout"]) == (0.0, 1.0)
    assert beats >= 20
    assert site.score("4", "4").reward == 1.0  # by a new process


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        "10**10**10",
        r"\boxed{100000000!}",
        r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}}",  # Math-Verify issue 65
        r"\boxed{\sum_{n=1}^{10000000} \frac{1}{n}}",
        r"\boxed{\binom{10^{9}}{10^{8}}}",
        r"\boxed{(x+y+z+1)^{300}}",
        r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
        "$" + "x" * 20000 + "$",
        "$ " * 100_000,
    ],
)
def test_no_answer_holds_it_up_or_fails_the_episode(site: Site, text: str) -> None:
    score = site.score(text, "4")
    assert score.reward == 0.0
    assert sum(score.parts.values()) <= 1.0


@pytest.mark.integration
def test_reference_that_takes_for_ever_is_the_records_fault(site: Site) -> None:
    with pytest.raises(EpisodeFailed, match="cannot read") as caught:
        site.score("4", "9^{9^{9^{9}}}+1")
    assert caught.value.reason == "reward_error"


# --- with workers that misbehave ----------------------------------------------------------------------------


def double(tmp_path: Path, body: str) -> list[str]:
    """A worker that writes its id to `starts` when it begins, and then runs `body` for each request."""
    script = tmp_path / "worker.py"
    lines = [
        "import os, signal, sys, time",
        "from asyncrl.extensions.children.processes import framed, messages",
        f"open({str(tmp_path / 'starts')!r}, 'a').write(f'start {{os.getpid()}}\\n')",
        "for request in messages(sys.stdin.buffer):",
        "    say = lambda **message: os.write(1, framed(message))",
        *(f"    {line}" for line in body.splitlines()),
    ]
    script.write_text("\n".join(lines))
    return [sys.executable, "-I", str(script)]


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text().splitlines())


def running(tmp_path: Path) -> int:
    """Return how many of the started processes are still running."""
    pids = [int(line.split()[1]) for line in (tmp_path / "starts").read_text().splitlines()]
    return sum(Path(f"/proc/{pid}").exists() for pid in pids)


def scored(reward: MathReward, *texts: str) -> list[Any]:
    """Return the scores of all texts, scored concurrently; failures are returned as they are."""

    async def main() -> list[Any]:
        try:
            async with asyncio.timeout(30):
                waiting = (reward(answer(text, answer="4")) for text in texts)
                return await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            await reward.close()

    return asyncio.run(main())


def test_dead_process_is_started_once_more_then_it_fails(tmp_path: Path) -> None:
    (failure,) = scored(MathReward(command=double(tmp_path, "os._exit(7)")), "4")
    assert isinstance(failure, EpisodeFailed)
    assert failure.reason == "reward_error"
    assert "ended with 7, twice" in str(failure)
    assert starts(tmp_path) == 2


def test_process_that_dies_once_costs_nothing(tmp_path: Path) -> None:
    body = f"if open({str(tmp_path / 'starts')!r}).read().count('start') < 2: os.kill(os.getpid(), signal.SIGSEGV)\n"
    body += "say(stage='answer'); say(verdict='equal', detail='')"
    assert [score.reward for score in scored(MathReward(command=double(tmp_path, body)), "4")] == [1.0]


def test_spent_cpu_time_is_blamed_on_what_was_read_then(tmp_path: Path) -> None:
    body = "if request['answer'] != 'gold': say(stage='answer')\nos.kill(os.getpid(), signal.SIGPROF)"
    score, failure = scored(MathReward(command=double(tmp_path, body), workers=1), "4", "gold")
    assert (score.reward, score.parts["math/timeout"]) == (0.0, 1.0)
    assert isinstance(failure, EpisodeFailed)
    assert (failure.reason, "cannot read '4'" in str(failure)) == ("reward_error", True)
    assert starts(tmp_path) == 2  # neither is asked again


def test_process_that_gets_no_time_is_no_fault_of_the_answer(tmp_path: Path) -> None:
    reward = MathReward(command=double(tmp_path, "time.sleep(60)"), deadline=0.3)
    (failure,) = scored(reward, "4")
    assert isinstance(failure, EpisodeFailed)
    assert "neither finished nor used up" in str(failure)


def test_no_more_processes_than_workers_and_each_is_used_again(tmp_path: Path) -> None:
    reward = MathReward(command=double(tmp_path, "say(stage='answer'); say(verdict='different', detail='')"), workers=2)
    assert [score.reward for score in scored(reward, *"1234567")] == [0.0] * 7
    assert starts(tmp_path) == 2


def test_one_who_leaves_ends_the_process_and_the_next_has_one(tmp_path: Path) -> None:
    body = f"if request['answer'] == 'hang': open({str(tmp_path / 'hangs')!r}, 'w'); time.sleep(60)\n"
    body += "say(stage='answer'); say(verdict='equal', detail='')"
    reward = MathReward(command=double(tmp_path, body), workers=1)

    async def main() -> Score:
        try:
            asking = asyncio.ensure_future(reward(answer("hang", answer="4")))  # type: ignore[arg-type]
            async with asyncio.timeout(30):
                while not (tmp_path / "hangs").exists():  # noqa: ASYNC110  another process makes it
                    await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait([asking])
            assert running(tmp_path) == 0
            return await asyncio.wait_for(reward(answer("4", answer="4")), 30)
        finally:
            await reward.close()

    assert asyncio.run(main()).reward == 1.0
    assert (starts(tmp_path), running(tmp_path)) == (2, 0)
