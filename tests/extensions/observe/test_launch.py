"""Engines and router get what they need to send spans, and headers name the request; what is wrong is refused."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl import lookup
from asyncrl.engine.stream import Headers
from asyncrl.errors import ConfigError
from asyncrl.extensions.observe.spans import traceparent
from asyncrl.launch.placement import Node, place, ports_wanted
from asyncrl.launch.plan import ProcessSpec, engines, plan
from asyncrl.rollout.parts import headers_of
from tests.fakes import addresses, compose_values, tiny_config

PORTS, RUN_DIR = tuple(range(20000, 20100)), Path("/runs/r")


def flags(spec: ProcessSpec) -> dict[str, str | bool]:
    """--name value pairs of a command line; a bare flag is True."""
    words = [*spec.argv[3:], *shlex.split(spec.env.get("ASYNCRL_ARGUMENTS", ""))]
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word[2:]: after.startswith("--") or after for word, after in pairs if word.startswith("--")}


def made(**changes: object) -> dict[str, ProcessSpec]:
    config = tiny_config(**{"engine.count": 2, **changes})
    placement = place(config, [Node("", "127.0.0.1", (), PORTS)])
    return {spec.name: spec for spec in plan(config, replace(addresses(), **placement.urls()), placement, RUN_DIR)}


def test_engines_and_router_send_spans_only_where_set() -> None:
    assert not any("OTEL" in name or "RUST_LOG" in name for spec in made().values() for name in spec.env)
    assert not [word for spec in made().values() for word in spec.argv if "trace" in word]
    config = tiny_config(**{"observe.engines": True})
    placement = place(config, [Node("", "127.0.0.1", (), PORTS)])
    shared = lookup.shared(config, placement)
    spans, key = shared["observe"]["spans"], shared["observe"]["key"]
    (port,) = placement.ports["observe"]
    others = {placement.router.port, placement.router.meeting, placement.rollout.port, placement.trainers[0].port}
    assert spans == f"127.0.0.1:{port.port}"
    assert port.port not in {0, *others}
    assert ports_wanted(config) == ports_wanted(tiny_config()) + 1
    run = replace(addresses(1, 0), **placement.urls(), extensions=shared)
    specs = {spec.name: spec for spec in plan(config, run, placement, RUN_DIR)}
    engine, router = flags(specs["engine-0"]), flags(specs["router"])
    assert engine["enable-trace"] is router["enable-trace"] is True
    assert engine["otlp-traces-endpoint"] == f"{placement.rollout.url}/v1/traces"
    assert (engine["otlp-service-name"], router["otlp-traces-endpoint"]) == ("engine-0", spans)
    protocols = [specs[name].env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] for name in ("engine-0", "router")]
    assert protocols == ["http/protobuf", "grpc"]
    assert all(key not in word and spans not in word for spec in specs.values() for word in spec.argv)
    told = [name for name, spec in specs.items() if any(key in value for value in spec.env.values())]
    assert told == ["engine-0", "router"]
    assert specs["engine-0"].env["REQUESTS_CA_BUNDLE"].endswith("ca.pem")


def test_engines_that_are_started_later_send_their_spans_too() -> None:
    config = tiny_config(**{"observe.engines": True})
    placement = place(config, [Node("", "127.0.0.1", (), PORTS)])
    run = replace(addresses(), extensions=lookup.shared(config, placement))
    (spec,) = engines(config, run, placement.engines, RUN_DIR, label="w-")
    assert flags(spec)["otlp-service-name"] == "engine-w-0"


def test_requests_name_their_trace_only_where_continued() -> None:
    run = addresses()

    def headers(**changes: Any) -> Headers:
        config = tiny_config(**changes)
        return headers_of(config, run, [one.player(config, run) for one in lookup.active(config).values()])

    assert headers()("g0", "g0 1", 2) == {}
    found = headers(**{"observe.engines": True})("g0", "g0 1", 2)
    assert found == {"traceparent": traceparent("run0", "g0", "1", 2, sampled=True)}
    seldom = headers(**{"observe.engines": True, "timelines.share": 0.0})
    assert seldom("g0", "g0 1", 2)["traceparent"].endswith("-00")


def test_its_settings_are_set_like_any_other() -> None:
    assert compose_values("observe.engines=true")["observe"] == {"engines": True}


@pytest.mark.parametrize("field", ["endpoint", "engines"])
def test_traces_of_nothing_and_without_an_address_are_refused(field: str) -> None:
    value = "http://collector:4318/v1/traces" if field == "endpoint" else True
    with pytest.raises(ConfigError, match="set timelines"):
        tiny_config(**{f"observe.{field}": value, "timelines.record": False})
    with pytest.raises(ConfigError, match="Must be as http"):
        tiny_config(**{"observe.endpoint": "collector:4318"})
