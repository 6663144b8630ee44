"""Engines that somebody else has started are refused where the run could not use them, with the flag that they lack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from asyncrl.errors import ConfigError
from asyncrl.extension import Extension, OfferedTransport
from asyncrl.extensions.reach.attached import attached_dtype, check_attached, wanted_of
from asyncrl.extensions.reach.extension import Reachability
from asyncrl.launch.cluster import cluster_of
from asyncrl.launch.prepare import KEY, Preparation
from tests.fakes import ALONE, tiny_config

URL = "http://10.0.0.9:30000"
WELL = {
    **dict.fromkeys(("tp_size", "dp_size", "pp_size", "ep_size"), 1),
    "speculative_algorithm": None,
    "incremental_streaming_output": True,
    "disable_overlap_schedule": True,
}
ATTACHED = {"engine.urls": [URL], "engine.count": 0}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def answers(info: dict[str, Any] | Exception, *, status: int = 200, version: str = "default") -> None:
        def get(url: str, **more: Any) -> httpx.Response:
            assert more["headers"] == {"Authorization": "Bearer key0"}
            if isinstance(info, Exception):
                raise info
            return httpx.Response(status, json={"weight_version": version} if "model_info" in url else info)

        monkeypatch.setattr("asyncrl.extensions.reach.attached.httpx.get", get)

    return answers


def refusal(**changes: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_attached(tiny_config(**ATTACHED | changes), "key0")
    assert (caught.value.field, caught.value.value) == ("engine.urls", URL)
    return caught.value


def test_engine_that_was_started_as_the_run_needs_it_passes(engine: Callable[..., None]) -> None:
    engine(WELL)
    check_attached(tiny_config(**ATTACHED), "key0")
    engine({**WELL, "tp_size": 2})
    check_attached(tiny_config(**ATTACHED, **{"engine.tensor_parallel": 2}), "key0")


def test_overlap_is_refused_only_for_in_place_pauses(engine: Callable[..., None]) -> None:
    engine({**WELL, "disable_overlap_schedule": False})
    assert "--disable-overlap-schedule" in str(refusal())
    check_attached(tiny_config(**ATTACHED, **{"weights.pause_mode": "retract"}), "key0")


@pytest.mark.parametrize(
    ("told", "flag"),
    [
        ({"dp_size": 2}, "with --dp-size 1"),
        ({"ep_size": 4}, "with --ep-size 1"),
        ({"speculative_algorithm": "EAGLE"}, "without --speculative-algorithm"),
    ],
)
def test_engine_that_cannot_take_or_prove_new_weights_is_refused(
    engine: Callable[..., None], told: dict[str, Any], flag: str
) -> None:
    engine({**WELL, **told})
    assert flag in str(refusal())
    engine({**WELL, **told}, version="7")
    check_attached(tiny_config(**ATTACHED, **ALONE), "key0")


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"engine.tensor_parallel": 2}, "--tp-size 2"),
        ({"deterministic": True, "rollout.max_staleness": 0}, "--enable-deterministic-inference"),
        ({"routing_replay.kind": "R3"}, "--enable-return-routed-experts"),
        ({"trainer.lora.rank": 8, "weights.lora": "versions"}, "--enable-lora"),
    ],
)
def test_engine_lacking_what_the_run_needs_names_the_flag(
    engine: Callable[..., None], changes: dict[str, Any], flag: str
) -> None:
    engine(WELL)
    assert f"start it with {flag}." in refusal(**changes).remedy


def test_engine_that_does_not_stream_what_is_new_is_refused(engine: Callable[..., None]) -> None:
    engine({"tp_size": 1})
    assert "--incremental-streaming-output" in refusal().remedy


def test_absent_foreign_or_false_engine_is_refused(engine: Callable[..., None]) -> None:
    engine(httpx.ConnectError("refused"))
    assert "does not answer (ConnectError refused)" in refusal().remedy
    engine({}, status=401)
    assert KEY in refusal().remedy
    engine({}, status=404)
    assert "404" in refusal().remedy


def test_engine_whose_weights_nobody_changes_must_have_a_version(engine: Callable[..., None]) -> None:
    records = ALONE
    engine(WELL)
    assert "--weight-version 0" in refusal(**records).remedy
    engine(WELL, version="0")
    check_attached(tiny_config(**ATTACHED, **records), "key0")


class Courier(Extension):
    transports = {"courier": OfferedTransport("courier:Courier", loader="courier.load")}  # noqa: RUF012


def test_engine_must_have_the_loader_of_the_runs_transport() -> None:
    extensions = {"courier": f"{__name__}:Courier"}
    config = tiny_config(**ATTACHED, extensions=extensions, **{"weights.transport": "courier"})
    assert wanted_of(config)["custom_weight_loader"] == ["courier.load"]


def test_number_format_of_engines_is_the_one_that_they_tell(engine: Callable[..., None]) -> None:
    auto = {"engine.dtype": "auto"}
    engine({**WELL, "dtype": "bfloat16"})
    assert attached_dtype(tiny_config(**ATTACHED, **auto), "key0") == "bfloat16"
    assert attached_dtype(tiny_config(**auto), "key0") is None
    with pytest.raises(ConfigError, match="start it with that dtype"):
        attached_dtype(tiny_config(**ATTACHED, **{"engine.dtype": "float32"}), "key0")
    engine({**WELL, "dtype": "auto"})
    assert attached_dtype(tiny_config(**ATTACHED, **auto), "key0") is None


def test_a_run_is_refused_by_what_its_engines_lack(engine: Callable[..., None], tmp_path: Path) -> None:
    config = tiny_config(**ATTACHED)
    prepared = Preparation(config, tmp_path / "run", cluster_of(config))
    prepared.key = "key0"
    engine({**WELL, "tp_size": 2})
    with pytest.raises(ConfigError, match="--tp-size 1"):
        Reachability(config).launch().refuse(prepared)
