"""Mathematical equality by math_verify (https://github.com/huggingface/Math-Verify): numbers, expressions, sets, LaTeX.

It runs in separate processes (math_worker.py) for two reasons: it takes 10 ms while the event loop has 10,000 other
things to do, and an answer of the policy may keep it busy forever (10^{10^{10}}, a sum of ten million terms). Failures
are attributed as follows:

    the answer's CPU time is spent     the answer's fault: 0 and parts {"math/timeout": 1}. A failure would let a policy
                                       choose not to be scored, and no score at all would stall the run
    math_verify raises on the answer   the answer's fault: 0 and {"math/error": 1}
    nothing mathematical in it         0 and {"math/unparsed": 1}
    any of these on the gold answer    EpisodeFailed("reward_error"): the record is at fault
    the process dies otherwise         one retry, then EpisodeFailed("reward_error")
    the process gets no CPU            EpisodeFailed("reward_error") after `deadline` seconds of wall-clock time

Words are not mathematics: "pairs" equals "Paris" here, as a product of the same letters. Use `exact` or `fuzzy` for
words.

waits for     a free worker, then its verdict
on a hang     the worker is killed (children/processes.py)
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from asyncrl.errors import EpisodeFailed
from asyncrl.extensions.children.processes import Reply, WorkerPool
from asyncrl.rewards.parameters import Count, Name, Seconds
from asyncrl.rewards.reward import RewardInput, Score

WORKER = "asyncrl.extensions.mathematics.math_worker"


class MathReward:
    """Reward of 1 when the last mathematical expression of an answer equals the reference."""

    inline = pure = True

    def __init__(
        self,
        answer_key: Name = "answer",
        workers: Count = 2,
        seconds: Seconds = 5.0,
        deadline: Seconds = 60.0,
        memory_mb: Count = 2048,
        command: Sequence[str] | None = None,
    ) -> None:
        """`seconds` is the CPU time for the gold answer and again for the answer. `command` replaces the worker in
        tests."""
        self._answer_key, self._seconds, self._deadline = answer_key, seconds, deadline
        self._workers = WorkerPool(command or [sys.executable, "-P", "-m", WORKER, str(memory_mb)], workers)

    async def __call__(self, answer: RewardInput) -> Score:
        """Score an answer. Raises EpisodeFailed for every failure that is not the answer's fault."""
        gold = str(answer.field(self._answer_key))
        request = {"gold": gold, "answer": answer.text, "seconds": self._seconds}
        for last in (False, True):
            reply = await self._workers.ask(request, until="verdict", seconds=self._deadline)
            if (score := self._score(reply, gold)) is not None:
                return score
            if last:
                raise EpisodeFailed("reward_error", f"math_verify's process ended with {reply.exit_code}, twice")
        raise AssertionError

    async def close(self) -> None:
        """Kill the processes."""
        await self._workers.close()

    def _score(self, reply: Reply, gold: str) -> Score | None:
        """Return the score, or None if the process died for an unknown reason."""
        if reply.late:
            raise EpisodeFailed(
                "reward_error",
                f"math_verify has neither finished nor used up its CPU time within {self._deadline:.0f} s",
                retry=True,  # the machine is busy
            )
        if not reply.messages or "verdict" not in reply.messages[-1]:
            if reply.exit_code != -signal.SIGPROF:
                return None
            if not reply.messages:
                raise EpisodeFailed("reward_error", f"math_verify cannot read {gold!r} in {self._seconds} CPU seconds")
            return Score(0.0, parts=_parts(timeout=1.0))
        verdict, detail = reply.messages[-1]["verdict"], reply.messages[-1]["detail"]
        if verdict == "gold":
            raise EpisodeFailed("reward_error", f"math_verify cannot use {gold!r} as a reference: {detail}")
        return Score(float(verdict == "equal"), parts=_parts(error=verdict == "error", unparsed=verdict == "unparsed"))


def _parts(timeout: float = 0.0, error: float = 0.0, unparsed: float = 0.0) -> dict[str, float]:
    """Return all parts every time, so that their means over episodes are fractions."""
    return {"math/timeout": timeout, "math/error": float(error), "math/unparsed": float(unparsed)}
