"""The order of a loan: nobody computes without its memory, and the GPUs are back before a batch or a version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch.distributed as dist

from asyncrl.engine.loans import LATEST, TRIALS
from asyncrl.metrics.record import StepLog
from asyncrl.trainer.lending import Lending

LEND = ["offload all but parameters", "publish 3 to the lent"]
TAKE_BACK = ["hold", "suspend", "give", "go on with 3", "onload"]


class Suspended:
    """A fleet that is only suspended and reconciled."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.changes, self.reconciled, self._note = 0, 0, note

    def reconcile(self) -> None:
        self.reconciled += 1

    def suspend(self) -> None:
        self.changes += 1
        self._note("suspend")


class Memory:
    """Memory of which is noted what moves."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def offload(self, *, parameters: bool) -> None:
        self._note("offload all" if parameters else "offload all but parameters")

    def onload(self, *, everything: bool) -> None:
        self._note("onload" if everything else "onload parameters")


class Loans(Lending):
    """A loan whose parts note what they are asked."""

    def __init__(self, *, allowed: bool = True, first: bool = True) -> None:
        self.calls, self.now, note = list[str](), 0.0, self.note
        fleet = Suspended(note)
        turns = type("Turns", (), {"give": lambda _: note("give", 2.0)})()
        memory: Any = Memory(note)
        self.fleet, any_fleet = fleet, cast(Any, fleet)
        super().__init__(
            *(any_fleet, turns if first else None, memory),
            lent=self.publisher("the lent"),
            always=self.publisher("the others"),
            log=StepLog([], started_at=0.0),
            allowed=lambda: allowed,
            hold=lambda: note("hold"),
            go_on=lambda version: note(f"go on with {version}"),
            clock=lambda: self.now,
        )

    def note(self, what: str, seconds: float = 0.0) -> None:
        self.calls.append(what)
        self.now += seconds

    def publisher(self, to: str) -> Any:
        def publish(_: Any, version: int) -> dict[str, float]:
            self.note(f"publish {version} to {to}", 1.0)
            return {"engines": 2.0}

        return type("Publisher", (), {"publish": publish})()

    def wait(self, seconds: float) -> bool:
        """Let the wait go on. Return whether a loan is due before or after."""
        early = self.due()
        self.now += seconds
        return early or self.due()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)


def test_the_gpus_are_lent_once_in_a_wait_and_back_when_it_ends() -> None:
    loans = Loans()
    assert loans.due()
    loans.lend(3)
    assert not loans.wait(10.0)
    loans.take_back()
    assert loans.calls == LEND + TAKE_BACK
    assert loans.take_figures() == {"engines/lent": 2.0, "time/lent": 10.0}
    assert loans.take_figures() == {}


def test_a_version_is_published_only_after_the_gpus_are_back() -> None:
    loans = Loans()
    loans.lend(3)
    loans.publish(4)
    assert loans.calls == [*LEND, *TAKE_BACK, "publish 4 to the others"]
    loans.publish(5)
    assert loans.calls[-1] == "publish 5 to the others"
    assert loans.calls.count("onload") == 1


def lent(loans: Loans, times: int = 1) -> None:
    """Lend and take back: 1 and 2 seconds."""
    for _ in range(times):
        assert loans.due()
        loans.lend(3)
        loans.take_back()


def test_the_next_loan_waits_for_as_long_as_the_last_ones_cost() -> None:
    loans = Loans()
    lent(loans, TRIALS)
    assert not loans.wait(5.9)
    loans.take_back()
    assert loans.wait(6.1)


def test_publishing_is_no_wait() -> None:
    loans = Loans()
    lent(loans, TRIALS)
    for version in range(10):
        loans.publish(version)
    assert not loans.wait(5.9)


def test_a_batch_that_was_ready_counts_as_a_wait_of_no_time() -> None:
    loans = Loans()
    for _ in range(LATEST):
        assert loans.wait(60.0)
        loans.lend(3)
        loans.take_back()
    assert loans.due()  # at once, as after three such waits
    loans.take_back()
    for version in range(LATEST):
        loans.publish(version)
        loans.take_back()
    assert not loans.wait(5.9)


def test_engines_and_routers_that_restart_are_noticed_in_a_loan() -> None:
    loans = Loans()
    assert loans.due()
    assert loans.fleet.reconciled == 0
    loans.lend(3)
    assert not loans.due()
    assert loans.fleet.reconciled == 1


def test_a_loan_in_which_an_engine_failed_measures_nothing() -> None:
    loans = Loans()
    lent(loans, TRIALS - 1)
    assert loans.due()
    loans.lend(3)
    loans._fleet.changes += 1
    loans.now += 100.0  # an engine was restarted
    loans.take_back()
    lent(loans)
    assert loans.wait(6.1)


def test_nothing_is_lent_before_it_is_allowed() -> None:
    assert not Loans(allowed=False).wait(1000.0)


def test_the_other_ranks_move_their_memory_and_call_no_engine() -> None:
    loans = Loans(first=False)
    loans.lend(3)
    loans.take_back()
    assert loans.calls == [*LEND, "onload"]


def test_every_rank_meets_before_any_takes_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loans = Loans()
    monkeypatch.setattr(dist, "barrier", lambda: loans.note("all ranks"))
    loans.lend(3)
    loans.take_back()
    assert loans.calls[-2:] == ["all ranks", "onload"]
