"""--check and a start tell whether a run has room, and how long it will take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncrl.extensions.plan.folders import look_at
from asyncrl.extensions.plan.preflight import ModelFolder, check_sync, needs_of
from asyncrl.extensions.plan.shapes import shape_of
from asyncrl.extensions.plan.tensors import Weight
from asyncrl.launch.checks.findings import Finding, failed
from asyncrl.launch.placement import imagined, place
from asyncrl.models import catalog
from tests.fakes import ALONE, GIVEN, JOB, tiny_config
from tests.launch.checks.worlds import found, job, placed, write_model


def test_a_run_on_this_machine_is_told_its_room_and_its_time(tmp_path: Path) -> None:
    told = found(tiny_config(), tmp_path)
    assert "estimate: " in told["run.max_steps"].value
    assert {told[field].level for field in ("trainer", "engine", "memory", "run.dir", "run.max_steps")} == {"ok"}


def test_a_cache_that_the_machine_has_no_room_for_is_an_error(tmp_path: Path) -> None:
    told = found(tiny_config(**{"engine.max_total_tokens": 10**12}), tmp_path)
    assert told["memory"].level == "error"
    assert "engine.max_total_tokens" in told["memory"].remedy


def test_other_errors_do_not_hide_the_disks(tmp_path: Path) -> None:
    told = found(tiny_config(**{"model.path": "/nowhere"}), tmp_path)
    assert failed(list(told.values()))
    assert told["run.dir"].level == "ok"


def test_of_a_job_to_come_neither_memory_nor_speed_is_known(tmp_path: Path) -> None:
    told = found(job(**{"cluster.gpus": 8, "trainer.data_parallel": 8, "engine.count": 8}), tmp_path)
    assert "memory size is unknown" in told["trainer"].value
    auto = {"trainer.dtype": "auto", "engine.dtype": "auto"}
    cpus = found(job(**{"cluster.gpus": 0, "cluster.nodes": 1, **auto}), tmp_path)
    assert "run.max_steps" not in cpus  # a login node's speed says nothing


def test_who_does_not_run_or_is_of_another_family_has_no_line(tmp_path: Path) -> None:
    told = found(tiny_config(**ALONE), tmp_path)
    assert "engine" in told
    assert not {"trainer", "checkpoint.every"} & told.keys()
    model = write_model(tmp_path / "judge")
    (model / "config.json").write_text('{"architectures": ["OtherForCausalLM"]}')
    assert "judge" not in found(tiny_config(**{"judge.model": str(model)}), tmp_path)


def test_engines_of_a_job_to_come_have_room_for_adapters(tmp_path: Path) -> None:
    """Where weights.lora=auto, the machines will be GPUs, and each version an adapter."""
    values = {**JOB, "cluster.gpus": 8, "trainer.dtype": "bfloat16", "engine.dtype": "bfloat16"}
    for rank, told in ((None, False), (8, True)):
        config = tiny_config(**{**values, "trainer.lora.rank": rank, "engine.max_total_tokens": 4096})
        assert ("adapters" in found(config, tmp_path)["engine"].value) == told


def test_the_cache_of_an_engine_in_host_memory_is_counted() -> None:
    config = tiny_config(**{"engine.device": "cuda", "engine.hicache": 20, "rollout.cache_key": "version"})
    shape = shape_of(json.loads((catalog.resolve("builtin:tiny") / "config.json").read_text()))
    assert needs_of(config, 1, {"model": ModelFolder([], shape)})["engine"].host == 20e9


def test_trainer_and_engine_on_one_gpu_need_their_parts() -> None:
    shape = shape_of(json.loads((catalog.resolve("builtin:tiny") / "config.json").read_text()))
    for placement, parts in (("shared", (0.6, 0.3)), ("separate", (None, 0.3))):
        config = tiny_config(**{"cluster.placement": placement, "engine.memory_fraction": 0.3})
        needs = needs_of(config, 1, {"model": ModelFolder([], shape)})
        assert (needs["trainer"].fraction, needs["engine"].fraction) == pytest.approx(parts)


def test_fitting_cache_needs_room_for_one_answer(tmp_path: Path) -> None:
    settings = {"cluster.gpus": 2, "cluster.nodes": 1, "engine.max_total_tokens": None}
    assert "KV cache of one answer" in found(job(**settings), tmp_path)["engine"].value
    assert "KV cache of one answer" not in found(job(**{**settings, "cluster.gpus": 0}), tmp_path)["engine"].value


def test_looking_at_a_folder_measures_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "one").write_bytes(bytes(1000))
    seen = look_at(tmp_path, 1 << 20)
    assert (seen.problem, seen.checkpoints) == ("", 1000)
    assert seen.free > 0
    assert seen.speed > 0
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoints", "one"]
    assert look_at(Path("/proc/asyncrl"), 1 << 20).problem  # where nobody writes, not even root


def sync(transport: str, machines: int, **changes: object) -> list[Finding]:
    config = job(**{"weights.transport": transport, **changes})
    return check_sync(config, placed(config, machines, 0), [Weight("model.norm.weight", (10**9,))], 0)


def test_shared_memory_between_machines_is_refused(tmp_path: Path) -> None:
    (refused,) = sync("tensor", 2)
    assert (refused.level, refused.field, refused.value) == ("error", "weights.transport", "tensor")
    assert "set auto" in refused.remedy
    assert [one.level for one in (*sync("tensor", 1), *sync("auto", 2))] == ["ok", "ok"]
    to_come = found(job(**{"cluster.gpus": 8, "trainer.data_parallel": 8, "engine.count": 8}), tmp_path)
    assert "distributed" in to_come["weights.transport"].value
    assert "weights.transport" not in found(tiny_config(**ALONE), tmp_path)


def test_cuda_ipc_is_told_where_engines_and_trainers_share_a_gpu() -> None:
    turns = {"cluster.placement": "colocated", "rollout.max_staleness": 1, "weights.pause_mode": "retract"}
    for changes, way in ((turns, "tensor"), ({"cluster.placement": "shared"}, "tensor"), ({}, "distributed")):
        config = tiny_config(**changes, **{"trainer.dtype": "bfloat16"})
        seats = place(config, imagined(config, 1, 2))
        (told,) = check_sync(config, seats, [Weight("w", (4, 4))], 2)
        assert told.value.startswith(way)


def test_trainers_on_several_machines_send_over_the_network() -> None:
    """Also where one of them is an engine's."""
    shape = {"trainer.data_parallel": 2, "cluster.trainer_nodes": 2}
    assert sync("auto", 2, **shape)[0].value.startswith("distributed")
    assert sync("auto", 1)[0].value.startswith("tensor")
    assert sync("auto", 1, **GIVEN) == []


def test_how_adapters_travel_is_told() -> None:
    adapted = {"trainer.lora.rank": 8, "weights.lora": "versions", "rollout.max_staleness": 1}
    assert sync("auto", 1, **adapted)[0].value.startswith("adapters in shared memory")
    shape = {"trainer.data_parallel": 2, "cluster.trainer_nodes": 2}
    found = sync("auto", 2, **shape, **adapted)[0].value
    assert found.startswith("adapters as PEFT folders")
    assert found.endswith("at most 4 in each engine")


def test_buckets_of_a_publish_are_told() -> None:
    config, megabytes = job(**{"weights.bucket_mb": 2}), [Weight(f"layer{number}", (1 << 18,)) for number in range(5)]
    assert check_sync(config, placed(config, 1, 0), megabytes, 0)[0].value.endswith("in about 3 bucket(s)")
