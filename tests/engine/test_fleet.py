"""The control plane against small real servers: who fails is lost and told, and the order of an update."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import HTTPServer
from typing import Any

import pytest

from asyncrl.engine.fleet import Fleet
from asyncrl.engine.update import Update
from asyncrl.errors import EngineError
from asyncrl.network.addresses import Access
from asyncrl.weights.distributed import lose_the_dead
from tests.fakes import JsonHandler

UPDATE = [
    "/pause_generation",
    "/begin_weight_update",
    "SENT",
    "/end_weight_update",
    "/update_weight_version",
    "/continue_generation",
]


class Engine:
    """Notes what it is asked; `faults` answers some paths otherwise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, dict[str, Any]] = {}
        self.faults: dict[str, tuple[int, dict[str, Any]]] = {}
        self.once: dict[str, tuple[int, dict[str, Any]]] = {}
        self.version = "0"
        engine = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.answer(200, {"weight_version": engine.version})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.headers["authorization"] != "Bearer key0":
                    self.answer(401, {})
                    return
                engine.calls.append(self.path)
                engine.bodies[self.path] = body
                if self.path == "/update_weight_version" and self.path not in engine.faults:
                    engine.version = body["new_version"]
                usual = engine.faults.get(self.path, (200, {"success": True, "message": ""}))
                self.answer(*engine.once.pop(self.path, usual))

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Router:
    """Notes who is added and removed."""

    def __init__(self) -> None:
        self.words: list[tuple[str, str]] = []
        self.kept = list[str]()

    def listed(self) -> dict[str, str]:
        return {url: str(number) for number, url in enumerate(self.kept)}

    def add(self, url: str) -> None:
        self.words.append(("add", url))

    def remove(self, url: str) -> None:
        self.words.append(("remove", url))

    def keep(self, urls: Sequence[str]) -> None:
        self.kept = list(urls)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started = [Engine(), Engine()]
    yield started
    for engine in started:
        engine.close()


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def fleet(engines: list[Engine], router: Router) -> Iterator[Fleet]:
    made = Fleet([engine.url for engine in engines], Access("key0"), timeout=5.0, router=router)
    yield made
    made.close()


def update(engines: list[Engine], fleet: Fleet, version: int = 4, mode: str = "in_place") -> None:
    """A whole update, with a mark in the place of the bytes."""
    protocol = Update(fleet, mode=mode)
    with protocol.paused():
        with protocol.session():
            for engine in engines:
                if engine.url in fleet.urls:
                    engine.calls.append("SENT")
        protocol.label(version)


def test_update_pauses_sends_names_and_goes_on(engines, fleet) -> None:
    update(engines, fleet)
    for engine in engines:
        assert engine.calls == UPDATE
        assert engine.bodies["/pause_generation"] == {"mode": "in_place"}
        assert engine.bodies["/update_weight_version"] == {"new_version": "4", "abort_all_requests": False}
    assert set(fleet.versions().values()) == {"4"}


def test_failed_send_leaves_all_paused_and_the_old_version(engines, fleet) -> None:
    protocol = Update(fleet, mode="in_place")
    with pytest.raises(RuntimeError, match="half-way"), protocol.paused(), protocol.session():
        raise RuntimeError("half-way")
    assert all(engine.calls == UPDATE[:2] for engine in engines)
    assert set(fleet.versions().values()) == {"0"}


@pytest.mark.parametrize("path", [path for path in UPDATE if path not in ("SENT", "/begin_weight_update")])
@pytest.mark.parametrize("fault", [(400, {"detail": "no"}), (200, {"success": False, "message": "no"})])
def test_refusing_engine_is_lost_and_the_others_go_on(path, fault, engines, fleet, router, capsys) -> None:
    engines[1].faults[path] = fault
    update(engines, fleet)
    assert fleet.serving == [engines[0].url]
    assert f"{engines[1].url}{path} answered {fault[0]}" in fleet.lost[engines[1].url]
    assert ("remove", engines[1].url) in router.words
    assert engines[1].url in capsys.readouterr().err
    assert engines[0].calls == UPDATE
    assert engines[0].version == "4"
    if path != "/continue_generation":
        assert "/continue_generation" not in engines[1].calls


def test_engine_that_still_reports_the_old_version_is_lost(engines, fleet) -> None:
    engines[0].faults["/update_weight_version"] = (200, {"success": True})
    update(engines, fleet)
    assert fleet.serving == [engines[1].url]
    assert "reports version 0 after version 4" in fleet.lost[engines[0].url]
    assert "/continue_generation" not in engines[0].calls


def test_engine_that_is_gone_is_lost(engines, fleet) -> None:
    gone = Fleet([engines[0].url, "http://127.0.0.1:9"], Access("key0"), timeout=5.0)
    assert list(gone.call("/pause_generation")) == [engines[0].url]
    assert "http://127.0.0.1:9/pause_generation: ConnectError" in gone.lost["http://127.0.0.1:9"]
    gone.close()


def test_engines_that_all_live_are_probed_once(engines, fleet, monkeypatch) -> None:
    probed = []
    monkeypatch.setattr(fleet, "get", lambda url, *_: probed.append(url))
    lose_the_dead(fleet)
    assert sorted(probed) == sorted(engine.url for engine in engines)
    assert not fleet.lost


def test_losing_the_last_engine_tells_every_loss(engines, fleet) -> None:
    for engine in engines:
        engine.faults["/flush_cache"] = (400, {})
    with pytest.raises(EngineError, match="no engine is left") as caught:
        fleet.call("/flush_cache")
    assert all(engine.url in str(caught.value) for engine in engines)


def test_requests_of_a_lost_engine_are_aborted(engines, fleet) -> None:
    fleet.lose(engines[0].url, "for a test")
    fleet._pool.shutdown(wait=True)
    assert engines[0].calls == ["/pause_generation"] * 2
    assert engines[0].bodies["/pause_generation"] == {"mode": "abort"}
    assert engines[1].calls == []


def test_session_that_a_dead_trainer_left_open_is_closed_first(engines, fleet) -> None:
    engines[0].once["/begin_weight_update"] = (400, {"success": False, "message": "a session is already open"})
    update(engines, fleet)
    again = ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
    assert engines[0].calls == [UPDATE[0], *again, *UPDATE[2:]]
    assert engines[1].calls == UPDATE


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_caches_are_flushed_until_it_succeeds(mode, engines, fleet) -> None:
    engines[0].once["/flush_cache"] = (400, {})
    update(engines, fleet, mode=mode)
    assert engines[0].calls[:3] == ["/pause_generation", "/flush_cache", "/flush_cache"]
    assert engines[1].calls[:2] == ["/pause_generation", "/flush_cache"]
    assert fleet.lost == {}


def test_engine_that_joins_gets_the_update_and_then_serves(engines, router) -> None:
    fleet = Fleet([engines[0].url], Access("key0"), timeout=5.0, router=router)
    fleet.join(engines[1].url)
    assert fleet.serving == [engines[0].url]
    update(engines, fleet)
    assert engines[1].calls == UPDATE
    assert fleet.serving == [engine.url for engine in engines]
    assert fleet.joining == []
    assert router.words == [("add", engines[1].url)]
    fleet.close()


def test_engine_that_fails_while_it_joins_is_never_routed_to(engines, router) -> None:
    fleet = Fleet([engines[0].url], Access("key0"), timeout=5.0, router=router)
    fleet.join(engines[1].url)
    engines[1].faults["/end_weight_update"] = (400, {})
    update(engines, fleet)
    assert fleet.serving == [engines[0].url]
    assert ("add", engines[1].url) not in router.words
    fleet.close()


def test_view_of_rank_0_brings_a_lost_engine_back(engines, fleet) -> None:
    fleet.lose(engines[1].url, "for a test")
    fleet.adopt([engines[0].url], [engines[1].url], 7)
    assert fleet.changes == 7
    assert fleet.urls == (engines[0].url, engines[1].url)
    assert fleet.lost == {}


# --- engines and routers that were started again --------------------------------------------------------------


def test_restarted_engine_joins_once_and_serves_updated(engines, router) -> None:
    first, second = engines
    notes: list[tuple[str, str]] = []
    fleet = Fleet(
        [first.url, second.url],
        Access("key0"),
        5.0,
        router=router,
        on_lost=lambda url, incarnation, _: notes.append((url, incarnation)),
    )
    fleet.reconcile()
    assert fleet.serving == [first.url, second.url]
    first.version = "restart-1"
    fleet.reconcile()
    fleet.reconcile()
    assert (fleet.serving, fleet.joining) == ([second.url], [first.url])
    assert router.kept == [second.url]  # no request before it has weights
    update(engines, fleet, version=5)
    assert set(fleet.serving) == {first.url, second.url}
    first.version = "restart-2"
    fleet.reconcile()
    assert (fleet.serving, fleet.joining) == ([second.url], [first.url])
    assert notes == [(first.url, ""), (first.url, "restart-1")]  # the incarnations that ended
    fleet.close()


def test_engine_failing_its_first_update_waits_for_the_next(engines, router) -> None:
    first, second = engines
    fleet = Fleet([first.url, second.url], Access("key0"), 5.0, router=router, on_lost=lambda *_: None)
    first.version = "restart-1"
    fleet.reconcile()
    first.faults["/begin_weight_update"] = (500, {"success": False, "message": "broken"})
    update(engines, fleet)
    fleet.reconcile()
    assert fleet.urls == (second.url,)
    first.faults.clear()
    first.version = "restart-2"
    fleet.reconcile()
    assert fleet.joining == [first.url]
    fleet.close()


def test_last_engine_may_go_when_it_will_be_started_again(engines, router) -> None:
    fleet = Fleet([engines[0].url], Access("key0"), 5.0, router=router, on_lost=lambda *_: None)
    fleet.lose(engines[0].url, "it died")
    assert not fleet.needs_weights()
    engines[0].version = "restart-1"
    assert fleet.needs_weights()
    update(engines[:1], fleet, version=6)
    assert fleet.serving == [engines[0].url]
    assert not fleet.needs_weights()
    fleet.close()


def test_engine_that_does_not_answer_a_probe_is_not_lost_for_it(engines, router) -> None:
    fleet = Fleet([engines[0].url, "http://127.0.0.1:9"], Access("key0"), 5.0, router=router)
    fleet.reconcile()
    assert fleet.serving == [engines[0].url, "http://127.0.0.1:9"]
    assert router.kept == [engines[0].url]
    fleet.close()


class DeadRouter(Router):
    def add(self, url: str) -> None:
        raise EngineError("the router does not answer")

    def remove(self, url: str) -> None:
        raise EngineError("the router does not answer")


def test_engine_joins_while_the_router_is_restarted(engines) -> None:
    router = DeadRouter()
    fleet = Fleet([engines[0].url], Access("key0"), 5.0, router=router)
    fleet.join(engines[1].url)
    fleet.admit()
    assert fleet.serving == [engine.url for engine in engines]
    fleet.reconcile()
    assert engines[0].url in router.kept
    fleet.close()


def test_router_that_cannot_forget_an_engine_ends_the_run(engines) -> None:
    urls = [engine.url for engine in engines]
    alone = Fleet(urls, Access("key0"), 5.0, router=DeadRouter())
    with pytest.raises(EngineError, match="the router does not answer"):
        alone.lose(urls[0], "wrong weights")
    told: list[str] = []
    watched = Fleet(urls, Access("key0"), 5.0, router=DeadRouter(), on_lost=lambda url, *_: told.append(url))
    watched.lose(urls[0], "wrong weights")
    assert (told, watched.serving) == (urls[:1], urls[1:])
    alone.close()
    watched.close()


# --- engines that others have started -------------------------------------------------------------------------


class Members:
    """A register in memory."""

    def __init__(self) -> None:
        self.here: list[str] = []
        self.asked: set[str] = set()
        self.free: list[str] = []

    def joined(self) -> dict[str, Any]:
        return dict.fromkeys(self.here)

    def leaving(self) -> set[str]:
        return self.asked

    def let_go(self, url: str) -> None:
        self.free.append(url)


def test_engine_that_comes_gets_weights_and_may_leave(engines, router) -> None:
    first, guest = engines
    members = Members()
    fleet = Fleet([first.url], Access("key0"), 5.0, router=router, register=members)
    fleet.reconcile()
    assert fleet.urls == (first.url,)
    guest.version = "restart-abcd-0"
    members.here = [guest.url]
    fleet.reconcile()
    assert (fleet.serving, fleet.joining) == ([first.url], [guest.url])
    update(engines, fleet, version=5)
    assert fleet.serving == [first.url, guest.url]
    assert ("add", guest.url) in router.words
    members.asked = {guest.url}
    fleet.reconcile()
    assert fleet.serving == [first.url]
    assert router.words[-1] == ("remove", guest.url)
    assert members.free == [guest.url]
    fleet.reconcile()
    assert fleet.urls == (first.url,)  # it still answers, and is asked no more
    fleet.close()


def test_engine_whose_lease_has_ended_is_lost(engines, router) -> None:
    first, guest = engines
    members = Members()
    members.here, guest.version = [guest.url], "restart-abcd-0"
    fleet = Fleet([first.url], Access("key0"), 5.0, router=router, register=members)
    fleet.reconcile()
    update(engines, fleet)
    members.here = []
    fleet.reconcile()
    assert fleet.urls == (first.url,)
    assert "lease" in fleet.lost[guest.url]
    assert members.free == []
    fleet.close()


def test_engine_of_the_run_may_leave_without_having_served(engines, router) -> None:
    first, second = engines
    members = Members()
    fleet = Fleet([first.url, second.url], Access("key0"), 5.0, router=router, register=members)
    fleet.lose(second.url, "it hangs")
    members.asked = {second.url}
    fleet.reconcile()
    assert members.free == [second.url]
    fleet.close()


def test_restarted_trainers_find_the_attached_engines(engines: list[Engine], router: Router) -> None:
    """The one that the router does not know has no weights of the run yet."""
    first, second = engines
    router.kept = [first.url]
    fleet = Fleet([], Access("key0"), 5.0, attached=[first.url, second.url], router=router)
    fleet.inherit()
    assert (fleet.serving, fleet.joining) == ([first.url], [second.url])
    fleet.close()


def test_attached_engine_serves_only_with_weights_of_the_run(engines, router) -> None:
    ours, attached = engines
    attached.version = "default"
    fleet = Fleet([ours.url], Access("key0"), 5.0, attached=[attached.url], router=router, on_lost=lambda *_: None)
    assert (fleet.serving, fleet.joining) == ([ours.url], [attached.url])
    fleet.reconcile()
    assert fleet.joining == [attached.url]
    assert fleet.lost == {}
    update(engines, fleet, version=0)
    assert fleet.serving == [ours.url, attached.url]
    for _ in range(2):  # whoever owns it starts it again, twice
        attached.version = "default"
        fleet.reconcile()
        assert (fleet.serving, fleet.joining) == ([ours.url], [attached.url])
        assert router.words[-1] == ("remove", attached.url)
        update(engines, fleet, version=1)
        assert fleet.serving == [ours.url, attached.url]
    attached.version = "default"
    fleet.reconcile()
    fleet.lose(attached.url, "a call failed")
    fleet.reconcile()
    assert fleet.joining == [attached.url]  # nobody of ours would start it again
    fleet.close()
