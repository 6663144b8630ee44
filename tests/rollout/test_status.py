"""status.json says what the running groups and the engines do, and never ends a run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from asyncrl import jsonl
from asyncrl.observability.intervals import DECODE, PREFILL, PUBLISH, QUEUED
from asyncrl.rollout import status as module
from tests.fakes import addresses, until
from tests.rollout.service import Site, at, file_of


def test_file_says_who_waits_for_what_and_which_engine_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_GROUPS", 1)
    monkeypatch.setattr(module, "PERIOD", 0.02)

    async def play(site: Site) -> None:
        tickets = [await site.groups.ticket() for _ in range(2)]
        old, new = map(site.begin, tickets)
        site.receive(old[0], 3)
        held = old[1].activity.begin(QUEUED, PUBLISH)
        old[1].activity.since -= 60
        new[0].activity.begin(DECODE)
        new[1].activity.finish()
        following = asyncio.create_task(file_of(site, tmp_path).follow())
        await until((tmp_path / "status.json").exists)
        found = json.loads((tmp_path / "status.json").read_text())
        assert found["episodes"] == {"agent": 1, "queued": 1, "decode": 1, "waiting": 1}
        assert found["ledger"]["groups"]["running"] == 2
        (group,) = found["groups"]
        assert (group["uid"], group["tokens"], found["groups_left_out"]) == (tickets[0].uid, 3, 1)
        assert [one["waits_for"] for one in group["episodes"]] == ["its agent", "the end of a publish"]
        assert group["seconds"] > 59
        first, second = found["engines"]
        assert (first["state"], first["running"], first["capacity"]) == ("serving", 3, 1000.0)
        assert second == {"url": addresses(engines=2).engines[1], "state": "silent"}
        old[1].activity.end(held)
        old[1].activity.begin(PREFILL)
        await until(lambda: "prefill" in json.loads((tmp_path / "status.json").read_text())["episodes"])
        assert json.loads((tmp_path / "status.json").read_text())["episodes"]["prefill"] == 1
        following.cancel()

    at(play)


def test_refusing_disk_is_reported_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PERIOD", 0.01)
    replace, tried = jsonl.replace, list[Path]()
    monkeypatch.setattr(jsonl, "replace", lambda path, value: tried.append(path) or replace(path, value))

    async def play(site: Site) -> None:
        following = asyncio.create_task(file_of(site, tmp_path / "missing").follow())
        await until(lambda: len(tried) == 3)
        assert not following.done()
        following.cancel()

    at(play)
    assert capsys.readouterr().err.count("cannot be written") == 1
