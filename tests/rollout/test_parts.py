"""The parts of the rollout side that are put together from the settings."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checkpoints.manifest import ROLLOUT
from asyncrl.errors import ConfigError, PeerFailed, RecordError
from asyncrl.extension import Extension, RolloutHooks
from asyncrl.models import catalog
from asyncrl.models.tiny import TOKENS
from asyncrl.network.addresses import Addresses
from asyncrl.progress import failing, failures
from asyncrl.rollout.agent import close_all
from asyncrl.rollout.build import RolloutParts
from asyncrl.rollout.parts import ModelParts, _client, allow_files
from tests.fakes import tiny_config, tiny_values


@pytest.mark.parametrize(
    ("engines", "attached", "shape", "several"),
    [
        (1, 0, {}, False),
        (2, 0, {}, True),
        (1, 1, {}, True),
        (1, 0, {"tensor_parallel": 2, "data_parallel": 2}, True),
    ],
)
def test_siblings_spread_over_engines_or_replicas(
    engines: int, attached: int, shape: dict[str, int], several: bool
) -> None:
    config = tiny_config(
        **{"rollout.spread_siblings": True}, **{f"engine.{name}": size for name, size in shape.items()}
    )
    urls = tuple(f"http://engine-{number}" for number in range(engines + attached))
    addresses = Addresses(
        *("run", "key", catalog.resolve("builtin:tiny"), urls[:engines], "http://router", "http://rollout"),
        gpus=0,
        started_at=0.0,
        attached=urls[engines:],
    )
    client = _client(config, addresses, ModelParts.load(config, addresses.model, addresses.gpus), "")
    assert client._spread(1) is several
    assert client._settings.vocabulary == len(TOKENS)


class Keeping(Extension):
    """Keeps a state, and draws the second of two tasks alone."""

    def rollout(self) -> RolloutHooks:
        return Kept()


class Kept(RolloutHooks):
    kept = b"nothing"

    def mixture(self, weights: Mapping[str, float], version: int) -> Mapping[str, float]:
        return {"two": weights["two"] * version}

    def state(self) -> bytes:
        return self.kept

    def restore(self, state: bytes) -> None:
        self.kept = state


def test_extensions_weigh_tasks_and_resume_from_a_snapshot(tmp_path: Path) -> None:
    urls, task = ("http://engine-0", "http://router", "http://rollout"), tiny_values()["task"]
    folder = catalog.resolve("builtin:tiny")
    addresses = Addresses("run", "key", folder, urls[:1], *urls[1:], gpus=0, started_at=0.0)
    changes: dict[str, Any] = {
        "rollout.max_running_groups": None,
        "tasks": {name: {**task, "name": name} for name in ("one", "two")},
    }

    def parts(resume: Path | None, **more: Any) -> RolloutParts:
        built = RolloutParts(tiny_config(**changes, **more), replace(addresses, resume=resume), tmp_path)
        asyncio.run(built.close())
        return built

    keeping = {"extensions.keeping": f"{__name__}:Keeping"}
    first = parts(None, **keeping)
    assert {first._draw(7).task for _ in range(20)} == {"two"}
    first.hooks["keeping"].restore(b"something")
    (tmp_path / ROLLOUT).write_bytes(first._save(first.groups.state(), 0))
    again = parts(tmp_path, **keeping)
    assert again.hooks["keeping"].state() == b"something"
    assert again._draw(7).uid == f"p{20:08d}"
    with pytest.raises(RecordError, match=r"written with the extension keeping: set extensions\.keeping again"):
        parts(tmp_path)


def test_every_part_is_closed_once_with_warnings() -> None:
    """Dataclasses of users, such as PlayingParts itself, cannot be hashed."""

    @dataclass
    class Part:
        error: BaseException | None = None
        closed: int = 0

        async def close(self) -> None:
            self.closed += 1
            if self.error:
                raise self.error

    bad, good, warned = Part(KeyError("planted")), Part(), list[str]()
    asyncio.run(close_all([bad, bad, object(), good], lambda text, trace: warned.append(text)))
    assert (bad.closed, good.closed) == (1, 1)
    (text,) = warned
    assert "Part could not be closed: close: KeyError: 'planted'" in text
    assert __file__ in text


def test_recorded_error_is_the_first_with_the_users_line(tmp_path: Path) -> None:
    def users() -> None:
        raise KeyError("planted")

    def process() -> None:
        try:
            with failing(tmp_path, "rollout"):
                try:
                    users()
                except KeyError as error:
                    raise ExceptionGroup("unhandled", [ExceptionGroup("more", [error]), ValueError()]) from None
        finally:
            raise OSError("of the closing")

    with pytest.raises(OSError), failing(tmp_path, "rollout"):
        process()
    with pytest.raises(PeerFailed), failing(tmp_path, "trainer-0"):
        raise PeerFailed("the rollout process failed")
    (found,) = failures(tmp_path)
    assert (found["process"], found["error"]) == ("rollout", "KeyError: 'planted'")
    assert found["place"].startswith(f"{__file__}:{users.__code__.co_firstlineno + 1}, in ")


def test_episodes_that_need_too_many_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: allowed.append(limits))
    shape = {"rollout.batch_groups": 200, "rollout.group_size": 8, "rollout.max_staleness": 0, "rollout.lead": None}

    def check(running: int | None, processes: int = 1) -> None:
        allow_files(tiny_config(**shape, **{"rollout.max_running_groups": running}), pytest.fail, processes)

    with pytest.raises(ConfigError, match=r"rollout.max_running_groups: got 150. 150 groups of 8 need up to 1456"):
        check(150)
    with pytest.raises(ConfigError, match=r"rollout.max_running_groups: got None. 200 groups of 8 need up to 1856"):
        check(None)
    check(150, processes=2)
    check(90)
    assert set(allowed) == {(1024, 1024)}
