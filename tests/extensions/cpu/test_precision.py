"""dtype=auto: the machine that runs a part decides, all ranks agree, and explicit settings are obeyed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError, LaunchError
from asyncrl.extensions.cpu import probe
from asyncrl.extensions.cpu.probe import MARK, Rates
from asyncrl.launch import precision
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import imagined, place
from tests.fakes import ALONE, GIVEN, JOB, Machines, tiny_config

HF = {"hidden_size": 576, "intermediate_size": 1536}
MODELS = {"trainer": HF, "engine": HF}
AVX2 = Rates("old", "AVX2", {"bfloat16": 5e9, "float32": 6e10}, {"bfloat16": 9e9, "float32": 6e10}, 2, 2.0)
AMX = Rates("new", "AMX", {"bfloat16": 4e11, "float32": 1e11}, {"bfloat16": 3e11, "float32": 1e11}, 2, 2.0)
MIXED = Rates("mixed", "AVX-512", {"bfloat16": 5e10, "float32": 1e11}, {"bfloat16": 2e11, "float32": 1e11}, 2, 2.0)
AUTO = {f"{part}.dtype": "auto" for part in precision.sections(tiny_config())}


class Measured(Machines):
    """A job's machines that answer the probe."""

    def __init__(self, config: Config, rates: dict[str, Rates], silent: Sequence[str] = ()) -> None:
        super().__init__(config)
        self._rates, self._silent = rates, silent

    def everywhere(self, program: list[str], seconds: float, nodes: Sequence[str] | None = None, **_: Any) -> list[str]:
        assert nodes
        super().everywhere(program, seconds, nodes)
        shapes = program[3:]
        answers = [
            f"{MARK}{shape} {node} {self._rates[node].line()}"
            for node in nodes
            for shape in shapes
            if node not in self._silent
        ]
        return ["module load: done\n" + "\n".join(answers)]


def resolved(rates: Rates, monkeypatch: pytest.MonkeyPatch, gpus: int = 0, **changes: Any) -> precision.Precision:
    """Return the resolution on one machine."""
    monkeypatch.setattr(probe, "cached", lambda *_: rates)
    config = tiny_config(**{**AUTO, **changes})
    placement = place(config, imagined(config, 1, gpus))
    placement = replace(placement, trainers=[replace(s, node=replace(s.node, name="")) for s in placement.trainers])
    engines = [[replace(s, node=replace(s.node, name="")) for s in seats] for seats in placement.engines]
    return precision.resolve(config, MODELS, replace(placement, engines=engines), gpus, Cluster(config))


def dtypes(config: Config) -> tuple[str, str]:
    return config.trainer.dtype, config.engine.dtype


@pytest.mark.parametrize(
    ("rates", "expected"),
    [(AVX2, ("float32", "float32")), (AMX, ("bfloat16", "bfloat16")), (MIXED, ("float32", "bfloat16"))],
    ids=["avx2", "amx", "mixed"],
)
def test_each_side_takes_what_its_cpu_multiplies_faster(
    rates: Rates, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolved(rates, monkeypatch)
    assert dtypes(found.config) == expected
    assert all(f"on {rates.host} ({rates.cpu}) (measured)" in choice.why for choice in found.choices)


def test_nothing_stays_auto_for_a_process_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in ({}, ALONE, GIVEN):
        found = resolved(AVX2, monkeypatch, **mode).config
        assert {getattr(found, part).dtype for part in precision.sections(found)} == {"float32"}


def test_gpus_take_bfloat16_and_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "everywhere", lambda *_: pytest.fail("no probe on GPUs"))
    config = tiny_config(**AUTO)
    found = precision.resolve(config, MODELS, place(config, imagined(config, 1, 2)), 2, Cluster(config))
    assert dtypes(found.config) == ("bfloat16", "bfloat16")
    assert {choice.why for choice in found.choices} == {"auto: it runs on GPUs"}


def test_slow_explicit_setting_is_obeyed_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = resolved(AVX2, monkeypatch, **{"trainer.dtype": "bfloat16", "engine.dtype": "float32"})
    assert dtypes(found.config) == ("bfloat16", "float32")
    trainer, engine = found.choices
    assert "float32 is 12.0 times as fast on old (AVX2)" in trainer.why
    assert trainer.remedy == "Set trainer.dtype=auto, or float32."
    assert not engine.remedy
    assert trainer.remedy in trainer.line()


def test_run_that_goes_on_keeps_the_dtype_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cached", lambda *_: AVX2)
    config = tiny_config(**AUTO)
    placement = place(config, imagined(config, 1, 0))
    placement = replace(placement, trainers=[], engines=[])
    placement = replace(placement, rollout=replace(placement.rollout, node=replace(placement.rollout.node, name="")))
    before = {"trainer": {"dtype": "bfloat16"}, "engine": {"dtype": "bfloat16"}}
    found = precision.resolve(config, MODELS, placement, 0, Cluster(config), before=before)
    assert dtypes(found.config) == ("bfloat16", "bfloat16")
    again = precision.resolve(config, MODELS, placement, 0, Cluster(config), before={"trainer": {"dtype": "auto"}})
    assert dtypes(again.config) == ("float32", "float32")
    explicit = tiny_config(**AUTO | {"trainer.dtype": "float32"})
    assert dtypes(precision.resolve(explicit, MODELS, placement, 0, Cluster(config), before=before).config) == (
        "float32",
        "bfloat16",
    )


def test_engines_that_run_already_tell_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "cached", lambda *_: AVX2)
    config = tiny_config(**AUTO, **{"engine.count": 0, "engine.urls": ["http://there:1"]})
    placement = place(config, imagined(config, 1, 0))
    trainers = [replace(seat, node=replace(seat.node, name="")) for seat in placement.trainers]
    given = {"engine": ("bfloat16", "they tell")}
    found = precision.resolve(config, MODELS, replace(placement, trainers=trainers), 0, Cluster(config), given=given)
    assert dtypes(found.config) == ("float32", "bfloat16")
    assert found.choices[1].why == "they tell"


def test_slowest_machine_of_a_part_decides_for_its_ranks() -> None:
    config = tiny_config(**AUTO, **{**JOB, "trainer.data_parallel": 2, "engine.count": 1})
    nodes = imagined(config, 4, 0)
    placement = place(config, nodes)
    trainers = {seat.node.name for seat in placement.trainers}
    engines = {seats[0].node.name for seats in placement.engines}
    rates = {node.name: AMX for node in nodes}
    rates |= {sorted(trainers)[0]: replace(AVX2, host="slow")}
    machines = Measured(config, rates)
    found = precision.resolve(config, MODELS, placement, 0, machines)
    assert found.config.trainer.dtype == "float32"
    assert "slow" in found.choices[0].why
    assert found.config.engine.dtype == ("float32" if sorted(trainers)[0] in engines else "bfloat16")
    (asked,) = machines.asked
    assert asked["program"][3:] == ["576x1536"]
    assert set(asked["nodes"]) == trainers | engines


def test_machine_silent_at_the_probe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(**AUTO, **JOB)
    nodes = imagined(config, 2, 0)
    machines = Measured(config, {node.name: AVX2 for node in nodes}, silent=[nodes[0].name])
    with pytest.raises(LaunchError, match=rf"{nodes[0].name}.*set trainer.dtype.*\n.*module load"):
        precision.resolve(config, MODELS, place(config, nodes), 0, machines)
    explicit = tiny_config(**{**JOB, "trainer.dtype": "bfloat16"})
    found = precision.resolve(explicit, MODELS, place(explicit, nodes), 0, machines)
    assert dtypes(found.config) == ("bfloat16", "float32")
    assert "there is no time estimate" in capsys.readouterr().err


def test_future_job_is_assumed_to_take_the_larger_format() -> None:
    config = tiny_config(**AUTO)
    assert dtypes(precision.assumed(config, 0)) == ("float32", "float32")
    assert dtypes(precision.assumed(config, 8)) == ("bfloat16", "bfloat16")
    assert dtypes(precision.assumed(tiny_config(**{"trainer.dtype": "bfloat16"}), 0))[0] == "bfloat16"


def test_resolved_configuration_of_the_run_before_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"trainer": {"dtype": "bfloat16"}}))
    checkpoint = tmp_path / "checkpoints" / "00000002"
    checkpoint.mkdir(parents=True)
    for changes in ({"resume": str(checkpoint)}, {"resume": str(tmp_path)}):
        assert precision.recorded(tiny_config(**changes), tmp_path / "new") == {"trainer": {"dtype": "bfloat16"}}
    assert precision.recorded(tiny_config(resume="auto"), tmp_path) == {"trainer": {"dtype": "bfloat16"}}
    assert precision.recorded(tiny_config(), tmp_path) is None
    assert precision.recorded(tiny_config(resume="auto"), tmp_path / "new") is None


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.dtype"):
        tiny_config(**{"trainer.dtype": "float16"})
