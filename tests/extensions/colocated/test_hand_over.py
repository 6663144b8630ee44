"""The hand-over of GPUs between engines and trainers: no token is generated from weights that were released and not
sent again, no engine resumes memory that it has not released, and every wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.engine.fleet import Fleet
from asyncrl.errors import DeadlineExceeded, EngineError
from asyncrl.extensions.colocated.hand_over import HandOver
from asyncrl.models import catalog
from asyncrl.network.addresses import TRAINING, Access
from asyncrl.parallel import EngineParallel, Parallel
from asyncrl.weights.checksum import ExpectedChecksums
from asyncrl.weights.publish import Outgoing, Publisher
from tests.engine.scrambling import ScramblingEngine
from tests.fakes import tiny_config
from tests.integration.publisher import ALONE, FakeRollout, SeededWeights

files = pytest.importorskip("asyncrl.extensions.files.transport")
MODEL = "builtin:tiny"
START_SECONDS, CALL_SECONDS = 60.0, 60.0
TURN = [
    *("/pause_generation", "/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"),
    *("/update_weights_from_disk", "/weights_checker", "/update_weight_version"),
    *("/resume_memory_occupation", "/continue_generation"),
]
"""Calls of a turn, in order."""


class Rig:
    """Two engines, the fleet that reaches them, and a real publisher with weights of its own."""

    def __init__(self, folder: Path) -> None:
        model = catalog.resolve(MODEL)
        self.weights = SeededWeights(model)
        self.first_tokens: list[str] = []
        self.engines = [ScramblingEngine(model, self._check) for _ in range(2)]
        self.lost: list[str] = []
        self.folder = folder
        self.start_trainers()

    def start_trainers(self) -> None:
        """Make what trainers have who have just started."""
        self.fleet = Fleet(
            [engine.url for engine in self.engines],
            Access("key0"),
            timeout=CALL_SECONDS,
            on_lost=lambda url, incarnation, reason: self.lost.append(url),
        )
        self.hand_over = HandOver(self.fleet, mode="retract", start_timeout=START_SECONDS, folder=self.folder)
        config = tiny_config(
            **{"weights.pause_mode": "retract", "weights.staging": "stream", "weights.verify_every": 1}
        )
        hf = self.engines[0]._hf
        self.publisher = Publisher(
            Parallel(**ALONE),
            self.hand_over,
            files.DiskTransport(self.fleet, self.folder / "weights", 0),
            Outgoing(
                self.weights,  # type: ignore[arg-type]
                lambda: ExpectedChecksums(hf, EngineParallel(), dtype=torch.float32),
            ),
            config.weights,
            FakeRollout(),
        )

    def publish(self, version: int) -> dict[str, float]:
        self.weights.version = version
        return self.publisher.publish(version)

    def _check(self, version: str, held: dict[str, Tensor]) -> None:
        """At its first token an engine has every tensor of its version."""
        sent = self.weights.at(int(version))
        assert held.keys() == sent.keys()
        wrong = [name for name, tensor in held.items() if not tensor.equal(sent[name])]
        assert not wrong, wrong
        self.first_tokens.append(version)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    for engine in made.engines:
        with suppress(OSError):
            engine.die()
    made.fleet.close()


def test_every_released_weight_is_sent_before_the_first_token(rig: Rig) -> None:
    for version in (1, 2):
        rig.hand_over.give()
        assert all(rig.hand_over.released(engine.url) for engine in rig.engines)
        assert all(tensor.isnan().all() for engine in rig.engines for tensor in engine.weights.values())
        assert (rig.folder / TRAINING).exists()
        figures = rig.publish(version)
        assert figures["engines"] == 2
        assert figures["pause"] > 0
        assert not (rig.folder / TRAINING).exists()
    assert rig.first_tokens == ["1", "1", "2", "2"]
    assert [engine.calls for engine in rig.engines] == [TURN * 2] * 2
    assert [engine.broken for engine in rig.engines] == [[], []]


def test_engine_that_misses_a_tensor_never_generates(rig: Rig) -> None:
    engine = rig.engines[1]
    load = engine._routes["/update_weights_from_disk"]

    def all_but_one(body: dict[str, Any]) -> dict[str, Any]:
        load(body)
        next(iter(engine.weights.values())).fill_(torch.nan)
        return {}

    engine._routes["/update_weights_from_disk"] = all_but_one
    rig.hand_over.give()
    rig.publish(1)
    assert rig.first_tokens == ["1"]
    assert rig.lost == [engine.url]


def test_memory_that_was_released_is_not_released_again(rig: Rig) -> None:
    rig.hand_over.give()
    rig.hand_over.give()
    rig.publish(1)
    assert [engine.calls for engine in rig.engines] == [TURN] * 2


class TrainerDied(BaseException):
    """Nobody catches it."""


@pytest.mark.parametrize("number", range(1, len(TURN) + 1))
def test_restarted_trainers_make_engines_release_their_memory(
    number: int, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those died after the first engine had answered so many calls of a turn, and the other one less."""
    post = rig.fleet.post

    def until_death(url: str, *given: Any) -> dict[str, Any]:
        engine = next(engine for engine in rig.engines if engine.url == url)
        answered = len(engine.calls)
        if answered == number - (engine is rig.engines[1]):
            raise TrainerDied
        return post(url, *given)

    monkeypatch.setattr(rig.fleet, "post", until_death)

    def turn() -> None:
        rig.hand_over.give()
        rig.publish(1)
        rig.hand_over.give()

    with pytest.raises(TrainerDied):
        turn()
    rig.fleet.close()
    rig.start_trainers()
    assert not (rig.folder / TRAINING).exists(), "an engine that died in the trainers' turn would never be restarted"
    rig.hand_over.give()
    assert [engine.released for engine in rig.engines] == [{"weights", "kv_cache"}] * 2
    rig.first_tokens.clear()
    rig.publish(2)
    assert rig.first_tokens == ["2", "2"]
    assert [engine.broken for engine in rig.engines] == [[], []]
    assert rig.lost == []


def test_engine_dying_without_memory_is_lost_others_generate(rig: Rig) -> None:
    rig.hand_over.give()
    rig.engines[1].die()
    assert rig.publish(1)["engines"] == 1
    assert rig.first_tokens == ["1"]
    assert rig.lost == [rig.engines[1].url]
    assert rig.fleet.absent() == [rig.engines[1].url]


def test_engine_restarted_in_the_turn_has_memory_and_follows(rig: Rig) -> None:
    rig.hand_over.give()
    rig.engines[1].die()
    rig.engines[1].start("restart-1")
    rig.engines[1].calls.clear()
    assert rig.publish(1)["engines"] == 2
    assert rig.first_tokens == ["1", "1"]
    assert rig.engines[1].calls == TURN
    assert rig.engines[1].broken == []


def test_trainers_wait_for_an_engine_that_is_being_restarted(rig: Rig) -> None:
    rig.hand_over.give()
    rig.engines[1].die()
    rig.publish(1)
    timer = threading.Timer(0.5, rig.engines[1].start, ["restart-1"])
    timer.start()
    rig.hand_over.give()
    timer.join()
    assert all(rig.hand_over.released(engine.url) for engine in rig.engines)
    assert rig.engines[1].released == {"weights", "kv_cache"}


def test_engine_restarted_while_serving_releases_memory_once(rig: Rig) -> None:
    rig.hand_over.give()
    rig.publish(1)
    rig.engines[1].die()
    rig.engines[1].start("restart-1")
    rig.engines[1].calls.clear()
    rig.hand_over.give()
    rig.publish(2)
    assert rig.engines[1].calls == TURN
    assert rig.engines[1].broken == []


def test_lost_engine_keeps_the_gpus_from_the_trainers(rig: Rig) -> None:
    """cluster.on_engine_death=fail. Until then the others go on."""
    engine, urls = rig.engines[1], [engine.url for engine in rig.engines]
    rig.fleet = Fleet(urls, Access("key0"), timeout=CALL_SECONDS)
    hand_over = HandOver(rig.fleet, mode="retract", start_timeout=START_SECONDS, folder=rig.folder)
    rig.fleet.lose(engine.url, "it answered 500")
    assert rig.fleet.urls == (rig.engines[0].url,)
    with pytest.raises(EngineError, match="may still use the trainers' GPUs were lost: it answered 500"):
        hand_over.give()
    assert not (rig.folder / TRAINING).exists()


def test_engine_that_does_not_come_back_ends_the_wait_by_name(rig: Rig) -> None:
    rig.hand_over = HandOver(rig.fleet, mode="retract", start_timeout=0.2, folder=rig.folder)
    rig.engines[1].die()
    with pytest.raises(DeadlineExceeded, match=rf"{rig.engines[1].url}.*to start, so that they can release"):
        rig.hand_over.give()
    assert not (rig.folder / TRAINING).exists()


@pytest.mark.parametrize("path", sorted({path for path in TURN if "weights" not in path}))
def test_engine_that_fails_a_call_is_lost_the_other_generates(path: str, rig: Rig) -> None:
    rig.engines[1].fails.add(path)
    rig.fleet.timeout = 4.0  # a flush that fails is tried again for so long
    if path in TURN[:3]:
        rig.hand_over.release()
    else:
        rig.hand_over.give()
    assert rig.publish(1)["engines"] == 1
    assert rig.first_tokens == ["1"]
    assert rig.lost == [rig.engines[1].url]
    assert rig.engines[0].broken == []


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/resume_memory_occupation", "/continue_generation"])
def test_engine_that_does_not_answer_a_call_in_time_is_lost(path: str, rig: Rig) -> None:
    rig.fleet.timeout = 4.0  # of which a busy machine may take some
    rig.engines[1].hangs[path] = 600.0
    began = time.monotonic()
    rig.hand_over.release()
    assert rig.publish(1)["engines"] == 1
    assert time.monotonic() - began < 300.0
    assert "ReadTimeout" in rig.fleet.lost[rig.engines[1].url]
    assert rig.engines[0].calls == TURN
