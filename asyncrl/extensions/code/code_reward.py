"""Code reward: unit tests run on the code of an answer, in a sandbox, with a verdict that the code cannot forge.

Tests and code run in two processes of one sandbox (code_harness.py explains their isolation), with a new sandbox for
every answer. If there is no verdict, the same tests are run on code that does nothing, to find out which side failed:

    no verdict twice (once at a limit), but one for     the code ended or stopped the harness: 0, {"code/no_verdict": 1}
    the harmless code
    none for the harmless code either                   EpisodeFailed("sandbox")
    the harness cannot be protected                     EpisodeFailed("sandbox")
    a test that is not Python, imports what is not in   EpisodeFailed("reward_error")
    the sandbox, or passes objects that are not plain
    data
    a record without tests                              EpisodeFailed("reward_error")

What remains forgeable is what the tests themselves leave open, such as helpers that they take from the answer by name.
Code that breaks out of the sandbox can forge anything.

waits for     one of `max_running` places, then the sandbox (`total_seconds`, its time limit)
on a hang     the harness ends each test, the sandbox ends the harness
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from asyncrl import user_code
from asyncrl.errors import ConfigError, EpisodeFailed
from asyncrl.extensions.code import code_tests
from asyncrl.extensions.code.code_process import BOOT, MOST_OUTPUT
from asyncrl.extensions.sandbox.protocol import Limits, Outcome, SandboxBackend
from asyncrl.rewards.parameters import Count, Name, Seconds, check
from asyncrl.rewards.reward import RewardInput, Score
from asyncrl.settings import Section

MARGIN_SECONDS = 10.0
"""Time allowed for the start of the harness."""
HARNESS_MB = 256
HARMLESS = "pass"
FAULTS = {
    "unsupported": "passes the code something other than plain data",
    "invalid": "is not valid Python, or imports a module that the sandbox lacks",
}


class CodeSettings(Section):
    """The tests of an answer's code, and the sandbox that runs them."""

    tests: Literal["asserts", "check", "programs"] = "asserts"
    reward: Literal["all", "share"] = "all"
    tests_key: Name | None = None
    """Field of the record with the tests (code_tests.py)."""
    prefix_key: Name | None = None
    """Field of the record whose text is put before the code."""
    sandbox: Name = "asyncrl.extensions.sandbox.local:LocalSandboxes"
    """Import path of a backend, which is created with the limits given here plus a margin."""
    sandbox_params: Mapping[str, Any] = {}
    python: Name = "python3"
    seconds: Seconds = 6.0
    """Seconds for each test."""
    total_seconds: Seconds = 30.0
    """Seconds for all tests."""
    memory_mb: Count = 1024
    max_running: Count = 8


class CodeReward:
    """Reward of 1 when all tests pass, or the fraction of tests that pass."""

    inline = pure = True
    Settings = CodeSettings

    def __init__(self, settings: CodeSettings, backend: SandboxBackend | None = None) -> None:
        """Create the sandboxes, unless a backend is given."""
        self._tests = code_tests.Tests(settings.tests, settings.tests_key)
        self._share = settings.reward == "share"
        self._prefix_key = settings.prefix_key
        self._command = [settings.python, "-I", "-c", BOOT, "0"]
        self._limits = {
            "seconds": settings.seconds,
            "total_seconds": settings.total_seconds,
            "memory_mb": settings.memory_mb,
        }
        self._seconds = settings.total_seconds + settings.seconds + MARGIN_SECONDS
        limits = Limits(
            seconds=self._seconds,
            cpu_seconds=self._seconds,
            memory_mb=settings.memory_mb + HARNESS_MB,
            file_mb=MOST_OUTPUT >> 20,
        )
        self._backend = backend or _backend(settings.sandbox, settings.sandbox_params, limits)
        self._room = asyncio.Semaphore(settings.max_running)

    async def __call__(self, answer: RewardInput) -> Score:
        """Score the answer's code. Raises EpisodeFailed for every failure that is not the code's fault."""
        tests = self._tests.of(answer)
        code = code_tests.code_of(answer.text)
        if not code.strip():
            return Score(0.0, parts=_parts())
        if self._prefix_key:
            code = f"{answer.field(self._prefix_key)}\n{code}"
        async with self._room:
            for last in (False, True):
                try:
                    return self._score(await self._results(code, tests))
                except _NoVerdictError as error:
                    if last or error.late:  # another attempt would take as long again
                        break
            try:
                await self._results(HARMLESS, tests)
            except _NoVerdictError as error:
                raise EpisodeFailed(
                    "sandbox", f"the tests gave no verdict, even on code that does nothing: {error}"
                ) from None
        return Score(0.0, parts=_parts(code=1.0, no_verdict=1.0))

    async def close(self) -> None:
        """Close the sandboxes."""
        await self._backend.close()

    def _score(self, results: Sequence[str]) -> Score:
        for number, result in enumerate(results):
            if result in FAULTS:
                raise EpisodeFailed("reward_error", f"test {number} of the record {FAULTS[result]}")
        share = results.count("passed") / len(results)
        parts = _parts(code=1.0, passed=share, timeout=float("timeout" in results))
        return Score(share if self._share else float(share == 1.0), parts=parts)

    async def _results(self, code: str, tests: code_tests.Sources) -> list[str]:
        """Return the results of a run in a new sandbox, in the order of the tests; after a failed test the rest run
        only for reward=share."""
        nonce = secrets.token_hex(16)
        payload = {
            "nonce": nonce,
            "modules": code_tests.modules("code_values", "code_candidate"),
            "code": code,
            "tests": tests,
            "until_one_fails": not self._share,
            **self._limits,
        }
        stdin = (
            json.dumps(code_tests.modules("code_values", "code_process", "code_harness")) + "\n" + json.dumps(payload)
        )
        sandbox = await self._backend.open()
        try:
            return _verdict(await sandbox.run(self._command, stdin=stdin.encode(), seconds=self._seconds), nonce)
        finally:
            await sandbox.close()


class _NoVerdictError(Exception):
    """The harness ended, or was killed, before it reported results. `late` says that it reached a limit of the
    sandbox."""

    def __init__(self, outcome: Outcome) -> None:
        self.late = outcome.reason not in ("exited", "killed")
        ending = outcome.stderr.decode(errors="replace")[-500:]
        super().__init__(f"{outcome.reason}, exit code {outcome.exit_code}: {ending}")


def _verdict(outcome: Outcome, nonce: str) -> list[str]:
    for line in outcome.stdout.decode(errors="replace").splitlines():
        if line.startswith(f"{nonce} "):
            verdict = json.loads(line.removeprefix(nonce))
            if "fault" in verdict:
                raise EpisodeFailed("sandbox", f"the tests cannot be run: {verdict['fault']}")
            results: list[str] = verdict["results"]
            return results
    raise _NoVerdictError(outcome)


def _parts(code: float = 0.0, passed: float = 0.0, timeout: float = 0.0, no_verdict: float = 0.0) -> dict[str, float]:
    """Return all parts every time, so that their means over episodes are fractions."""
    return {"code/found": code, "code/passed": passed, "code/timeout": timeout, "code/no_verdict": no_verdict}


def _backend(path: str, params: Mapping[str, Any], limits: Limits) -> SandboxBackend:
    """Return a backend with `limits`, unless its params override them."""
    maker = user_code.load(path, "sandbox")
    takes = inspect.signature(maker).parameters
    wanted = {"limits": limits, "nested": True}
    params = {**{name: value for name, value in wanted.items() if name in takes}, **params}
    check(maker, params, "sandbox_params")
    backend = maker(**params)
    if not hasattr(backend, "open"):
        raise ConfigError("sandbox", path, "Must be the import path of a backend (sandbox/protocol.py).")
    return cast(SandboxBackend, backend)
