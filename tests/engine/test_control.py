"""The control plane against small real servers: all engines or none, and the order of a publish."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from asyncrl.engine.control import Fleet
from asyncrl.errors import EngineError

PUBLISH = ["/pause_generation", "/begin_weight_update", "SENT", "/update_weight_version", "/end_weight_update"]


class Engine:
    """Notes what it is asked; `faults` answers some paths otherwise."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, dict[str, Any]] = {}
        self.faults: dict[str, tuple[int, dict[str, Any]]] = {}
        self.version = "0"
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {"weight_version": engine.version})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.headers["authorization"] != "Bearer key0":
                    self._answer(401, {})
                    return
                engine.calls.append(self.path)
                engine.bodies[self.path] = body
                if self.path == "/update_weight_version" and self.path not in engine.faults:
                    engine.version = body["new_version"]
                self._answer(*engine.faults.get(self.path, (200, {"success": True, "message": ""})))

            def _answer(self, status: int, values: dict[str, Any]) -> None:
                content = json.dumps(values).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started = [Engine(), Engine()]
    yield started
    for engine in started:
        engine.close()


@pytest.fixture
def fleet(engines: list[Engine]) -> Iterator[Fleet]:
    made = Fleet([engine.url for engine in engines], "key0", timeout=5.0)
    yield made
    made._pool.shutdown()
    made._http.close()


def sending(engines: list[Engine]) -> Callable[[], None]:
    return lambda: [engine.calls.append("SENT") for engine in engines] and None


def test_publish_pauses_sends_names_the_version_after_the_last_byte_and_goes_on(engines, fleet) -> None:
    with fleet.new_weights(4):
        assert fleet.versions() == ["0", "0"]
        sending(engines)()
    for engine in engines:
        assert engine.calls == [*PUBLISH, "/continue_generation"]
        assert engine.bodies["/pause_generation"] == {"mode": "in_place"}
        assert engine.bodies["/update_weight_version"] == {"new_version": "4", "abort_all_requests": False}
    assert fleet.versions() == ["4", "4"]


def test_failure_while_sending_leaves_all_paused_and_the_old_version(engines, fleet) -> None:
    with pytest.raises(EngineError, match="half-way"), fleet.new_weights(4):
        raise EngineError("half-way")
    assert all(engine.calls == PUBLISH[:2] for engine in engines)
    assert fleet.versions() == ["0", "0"]


@pytest.mark.parametrize("path", [path for path in PUBLISH if path != "SENT"])
@pytest.mark.parametrize("fault", [(400, {"detail": "no"}), (200, {"success": False, "message": "no"})])
def test_engine_that_refuses_is_named_and_nobody_goes_on(path: str, fault: tuple, engines, fleet) -> None:
    engines[1].faults[path] = fault
    with pytest.raises(EngineError) as caught, fleet.new_weights(4):
        sending(engines)()
    assert f"{engines[1].url}{path} answered {fault[0]}" in str(caught.value)
    assert engines[0].url not in str(caught.value)
    assert not any("/continue_generation" in engine.calls for engine in engines)


def test_engine_that_still_reports_the_old_version_keeps_the_fleet_paused(engines, fleet) -> None:
    engines[0].faults["/update_weight_version"] = (200, {"success": True})
    with pytest.raises(EngineError, match=r"after publishing version 4 the engines report"), fleet.new_weights(4):
        sending(engines)()
    assert not any("/continue_generation" in engine.calls for engine in engines)


def test_all_engines_are_asked_and_every_refusal_is_told(engines, fleet) -> None:
    for engine in engines:
        engine.faults["/flush_cache"] = (400, {})
    with pytest.raises(EngineError) as caught:
        fleet.call("/flush_cache")
    assert all(engine.url in str(caught.value) for engine in engines)


def test_engine_that_is_gone_is_named(engines, fleet) -> None:
    gone = Fleet([engines[0].url, "http://127.0.0.1:9"], "key0", timeout=5.0)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9/pause_generation: ConnectError"):
        gone.call("/pause_generation")
    assert engines[0].calls == ["/pause_generation"]
    gone._pool.shutdown()
    gone._http.close()
