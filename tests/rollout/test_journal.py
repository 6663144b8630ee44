"""Batches are kept for trainers that start again, and no longer than they may be needed; a rollout process that dies is
replaced by one that goes on from its last state."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.checkpoints import manifest
from asyncrl.checkpoints.store import CheckpointStore
from asyncrl.errors import RecordError
from asyncrl.rollout import snapshot
from asyncrl.rollout.journal import Journal, Left
from asyncrl.schema import Batch, decode_batch
from tests.examples import examples
from tests.rollout.chain import Chain, answers, machinery, prompt_of, uids
from tests.rollout.machinery import KEY

WARNINGS: list[str] = []


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    WARNINGS.clear()
    return Journal(tmp_path, WARNINGS.append)


def checkpoint(run_dir: Path, version: int) -> None:
    folder = CheckpointStore(run_dir).path(version)
    folder.mkdir(parents=True)
    (folder / manifest.NAME).touch()


def kept(run_dir: Path) -> list[str]:
    return sorted(file.name for file in (run_dir / "journal").iterdir())


def test_parts_are_read_as_they_were_kept(journal: Journal) -> None:
    journal.keep(3, 0, b"first")
    journal.keep(3, 1, b"second")
    assert [journal.read(3, part) for part in range(3)] == [b"first", b"second", None]


def test_batches_since_the_last_but_one_checkpoint_stay(journal: Journal, tmp_path: Path) -> None:
    for version in range(7):
        journal.keep(version, 0, b"batch")
        if version in (1, 3, 5):
            checkpoint(tmp_path, version + 1)
    assert kept(tmp_path) == ["00000004-0000", "00000005-0000", "00000006-0000"]


def test_where_one_checkpoint_is_kept_only_batches_since_it_stay(journal: Journal, tmp_path: Path) -> None:
    for version in range(4):
        journal.keep(version, 0, b"batch")
        shutil.rmtree(CheckpointStore(tmp_path).folder, ignore_errors=True)  # checkpoint.keep_last=1
        checkpoint(tmp_path, version + 1)
    journal.keep(4, 0, b"batch")
    assert kept(tmp_path) == ["00000004-0000"]


def test_run_that_begins_again_has_no_batches_of_an_earlier_one(journal: Journal, tmp_path: Path) -> None:
    journal.keep(0, 0, b"old")
    assert Journal(tmp_path, WARNINGS.append).read(0, 0) is None


def test_full_disk_costs_the_journal_and_not_the_run(journal: Journal, tmp_path: Path) -> None:
    journal.keep(0, 0, b"batch")
    (tmp_path / "journal/00000001-0000").mkdir()  # in the way of a file
    journal.keep(1, 0, b"batch")
    (warning,) = WARNINGS
    assert "are no longer kept" in warning
    journal.keep(2, 0, b"batch")
    assert not (tmp_path / "journal").exists()


def test_process_that_starts_again_finds_what_the_dead_one_left(journal: Journal, tmp_path: Path) -> None:
    assert Journal(tmp_path, WARNINGS.append, restarted=True).left == Left()
    journal.keep_state(b"old")
    journal.serves(3, held=True)
    journal.keep_state(b"new")
    left = Journal(tmp_path, WARNINGS.append, restarted=True).left
    assert (left.state, left.served, left.held) == (b"new", 3, True)
    journal.serves(4, held=False)
    left = Journal(tmp_path, WARNINGS.append, restarted=True).left
    assert (left.served, left.held) == (4, False)


def test_process_goes_on_from_its_last_state_alone(journal: Journal, tmp_path: Path) -> None:
    journal.keep_state(b"old")
    (tmp_path / "journal/served").mkdir()  # in the way of a file
    journal.serves(1, held=False)
    with pytest.raises(RecordError, match="was not kept, so the rollout process cannot go on"):
        Journal(tmp_path, WARNINGS.append, restarted=True)


STEPS = 8


class Mortal:
    """A rollout side that may die at any turn of the event loop, and is then replaced; and the trainer's requests."""

    def __init__(self, engine: Chain, run_dir: Path, choice: random.Random, often: float, **shape: Any) -> None:
        self.engine, self.run_dir, self.choice, self.often, self.shape = engine, run_dir, choice, often, shape
        self.deaths = 0
        self._begin(Journal(run_dir, print))

    def _begin(self, journal: Journal) -> None:
        left = journal.left
        state = snapshot.decode(left.state).service if left.state else None
        self.made = machinery(self.engine, drawn=state.drawn if state else 0, journal=journal, **self.shape)
        if left.state:
            self.made.go_on(left.state, prompt_of)
        if left.state or left.served is not None:
            version = self.made.groups.published_version
            self.made.groups.go_on(version if left.served is None else left.served, held=left.held)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.made.server.app()), base_url="http://service", headers=KEY
        )
        working = [self.made.worker.run(self.made.outstanding), self.made.server.keeper.keep_regularly()]
        self.tasks: list[asyncio.Task[Any]] = [asyncio.create_task(one) for one in working]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.http.aclose()
        await self.made.client.close()

    async def ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        """Return the answer to a request, which is repeated until a process lives long enough."""
        while True:
            asking = asyncio.create_task(self.http.request(method, path, **content))
            self.tasks.append(asking)
            if self.choice.random() < self.often:
                await self._turns(asking.done)
                await self.end()
                self.deaths += 1
                self._begin(Journal(self.run_dir, print, restarted=True))
            if not (await asyncio.wait([asking]))[0] or asking.cancelled():
                continue
            if (answer := asking.result()).status_code != 202:
                return answer.raise_for_status()

    async def _turns(self, over: Callable[[], bool]) -> None:
        for _ in range(self.choice.choice([3, 30, 300])):
            if over() and self.choice.random() < 0.5:
                return  # it is answered, but dies before the next request
            await asyncio.sleep(0)

    async def _batch(self, version: int, parts: int) -> Batch:
        """Return a batch that came in parts, each of which is the same when it is asked for again."""
        groups = []
        for part in range(parts):
            params = {"version": version, "part": part, "parts": parts}
            data = (await self.ask("GET", "/batch", params=params)).content
            groups += decode_batch(data).groups
            assert decode_batch((await self.ask("GET", "/batch", params={**params, "part": 0})).content).groups
            assert (await self.ask("GET", "/batch", params=params)).content == data
        return Batch(version, groups, {})

    async def batches(self) -> list[Batch]:
        found = []
        for version in range(STEPS):
            found.append(await self._batch(version, self.choice.choice([1, 2, 3])))
            await self.ask("POST", "/hold")
            self.engine.serving.clear()
            await self.engine._idle()
            self.engine.version = version + 1
            self.engine.serving.set()
            await self.ask("POST", "/version", json={"version": version + 1})
            if self.choice.random() < 0.3:
                await self.ask("POST", "/snapshot", json={"version": version + 1})
        await self.end()
        return found


@settings(deadline=None, max_examples=examples(12))
@given(
    seed=st.integers(0, 2**32),
    often=st.sampled_from([0.1, 0.5]),
    slack=st.integers(0, 2),
    running=st.sampled_from([None, 2]),
)
def test_dying_rollout_process_trains_every_group_once(
    seed: int, often: float, slack: int, running: int | None
) -> None:
    """The same batch is handed out again, and what it generates is what it would have generated."""
    choice, shape = random.Random(seed), {"lead": 2, "max_staleness": 2 + slack, "max_running": running}

    async def at_once(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Stand in for a thread, which would outlive the process here."""
        for _ in range(choice.choice([0, 3])):
            await asyncio.sleep(0)
        done = function(*arguments, **named)
        for _ in range(choice.choice([0, 3])):
            await asyncio.sleep(0)
        return done

    async def main() -> tuple[list[Batch], Mortal]:
        mortal = Mortal(Chain(seed), Path(folder), choice, often, **shape)
        return await asyncio.wait_for(mortal.batches(), 120), mortal

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "to_thread", at_once)
        batches, mortal = asyncio.run(main())
    assert [batch.version for batch in batches] == list(range(STEPS))
    trained = list(itertools.chain(*uids(batches)))
    assert len(set(trained)) == len(trained) == STEPS * 3
    for batch in batches:
        assert max(age for group in batch.groups for age in group.staleness(batch.version)) <= 2 + slack
    whole = answers(machinery(Chain(seed), **shape).batches(STEPS))
    assert all(whole[uid] == mine for uid, mine in answers(batches).items() if uid in whole)
    ledger = mortal.made.groups.ledger()  # in balance
    assert (ledger.groups.trained, ledger.groups.rejected) == (STEPS * 3, {})
