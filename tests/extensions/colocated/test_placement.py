"""cluster.placement=colocated: engines sit on the trainers' GPUs, start as engines that can release their memory, and
every setting that cannot work is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from asyncrl.platforms import here

here().prepare_trainer()

from asyncrl.config import Config  # noqa: E402
from asyncrl.errors import ConfigError  # noqa: E402
from asyncrl.extensions.colocated import memory, schedule  # noqa: E402
from asyncrl.launch.checks.machines import check_devices  # noqa: E402
from asyncrl.launch.placement import Placement, imagined, place  # noqa: E402
from asyncrl.launch.plan import plan  # noqa: E402
from asyncrl.trainer import gpu_sharing  # noqa: E402
from asyncrl.weights.transports import build_transport  # noqa: E402
from tests.fakes import ALONE, JOB, addresses, tiny_config  # noqa: E402

COLOCATED = {
    "cluster.placement": "colocated",
    "rollout.max_staleness": 1,
    "weights.pause_mode": "retract",
}


def colocated(**changes: Any) -> Config:
    return tiny_config(**{**COLOCATED, **changes})


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("weights.pause_mode", "in_place", "retract"),
        ("weights.transport", "distributed", "auto, tensor or disk"),
        ("weights.verify", False, "set true"),
        ("offload.optimizer", True, "set false"),
        ("rollout.max_staleness", 2, "set 0"),
        ("engine.urls", ["http://127.0.0.1:1"], "remove them"),
        ("engine.device", "cpu", r"trainer.device \(auto\)"),
        ("engine.server_args", {"enable_memory_saver": False}, "remove it"),
        ("engine.server_args", {"weight_cache_mode": "host"}, "remove it"),
    ],
)
def test_what_cannot_take_turns_is_refused_by_name(field: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as refused:
        colocated(**{field: value})
    assert refused.value.field.startswith(field)
    separate = {"cluster.placement": "separate"}
    tiny_config(**{field: value}, **separate)


def test_only_training_takes_turns() -> None:
    with pytest.raises(ConfigError, match=r"mode=alone has no GPUs to share"):
        colocated(**ALONE)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"engine.hicache": 64}, "unset engine.hicache"),
        ({"trainer.batch_parts": 2}, "set trainer.batch_parts=1"),
        ({"weights.overlap": True}, "set weights.overlap=false"),
        ({"trainer.lora.rank": 4, "weights.lora": "versions"}, "set weights.lora=merged"),
        (
            {
                "trainer.lora.rank": 4,
                "weights.lora": "versions",
                "agents.roles": {"judge": {"adapter": "judge", "past": None}},
            },
            "agents.roles.: set separate",
        ),
    ],
)
def test_what_cannot_be_placed_in_turns_is_refused(changes: dict[str, Any], remedy: str) -> None:
    tiny_config(**{**COLOCATED, "cluster.placement": "separate", **changes})
    with pytest.raises(ConfigError, match=remedy) as refused:
        colocated(**changes)
    assert refused.value.field == "cluster.placement"


def placed(config: Config, nodes: int, gpus: int) -> Placement:
    return place(config, imagined(config, nodes, gpus))


SHAPE = {"trainer.data_parallel": 4, "trainer.tensor_parallel": 2, "engine.count": 4, "engine.tensor_parallel": 2}


def test_engines_use_all_gpus_of_the_trainers_and_no_others() -> None:
    found = placed(colocated(**SHAPE, **JOB), 3, 4)
    on = [(seats[0].node.name, seats[0].gpus) for seats in found.engines]
    assert on == [("node0", (0, 1)), ("node0", (2, 3)), ("node1", (0, 1)), ("node1", (2, 3))]
    with pytest.raises(ConfigError, match="the engines use the 8 GPUs of the trainers"):
        placed(colocated(**SHAPE | {"engine.count": 3}), 1, 8)
    placed(colocated(**SHAPE | {"engine.count": 3}), 1, 0)  # on CPU any number may share the cores
    check_devices(colocated(**SHAPE), gpus=8)


def test_engines_that_take_turns_have_the_whole_memory() -> None:
    for given in (None, 0.3):
        config = colocated(**{"engine.memory_fraction": given})
        assert (config.engine_fraction, config.trainer_fraction) == (given, None)


@pytest.mark.parametrize("gpus", [0, 2])
def test_gpu_engines_have_a_memory_saver_and_see_ipc_gpus(gpus: int) -> None:
    config = colocated(**{"trainer.data_parallel": 2, "engine.count": 2})
    placement = placed(config, 1, gpus)
    specs = {spec.name: spec for spec in plan(config, addresses(2, gpus), placement, Path("/runs/r"))}
    engine = specs["engine-1"]
    assert ("--enable-memory-saver" in engine.argv) == (gpus > 0)
    assert engine.env["CUDA_VISIBLE_DEVICES"] == ("0,1" if gpus else "")
    assert not gpus or engine.argv[engine.argv.index("--base-gpu-id") + 1] == "1"
    assert engine.env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert specs["trainer-1"].env["CUDA_VISIBLE_DEVICES"] == ("0,1" if gpus else "")
    assert engine.shares
    assert not specs["router"].shares


def test_trainers_choose_cuda_ipc_where_both_use_a_gpu() -> None:
    """NCCL, which is the choice for GPUs of their own, refuses two ranks on one GPU."""
    config: Any = colocated(**{"trainer.dtype": "bfloat16"})
    fleet: Any = SimpleNamespace(urls=["http://127.0.0.1:1"])
    where: dict[str, Any] = {"host": "127.0.0.1", "alone": True, "stage": 0, "gpu": True, "folder": Path("/w")}
    assert build_transport(config, fleet, **where)[1].startswith("tensor")


def test_trainer_uses_a_gpu_after_its_engines_released_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank waits for the engines, and the others for it."""
    done = list[str]()
    monkeypatch.setattr(dist, "barrier", lambda: done.append("barrier"))
    given = SimpleNamespace(give=lambda: done.append("give"))
    monkeypatch.setattr(schedule, "HandOver", lambda *_, **__: given)
    first = SimpleNamespace(is_first=True)
    wait = {"wait_for_engines": lambda: done.append("ready")}
    rank: Any = SimpleNamespace(config=colocated(), run_dir=tmp_path, parallel=first, **wait)
    fleet: Any = None
    sharing = gpu_sharing.share_gpu(rank, fleet)
    assert done == ["ready", "barrier", "give", "barrier"]
    assert sharing.update is given
    assert rank.config.changes_base  # the engines get the trainers' weights before the first request


def test_memory_is_released_once_however_often_it_is_asked_for() -> None:
    released: list[list[str]] = []

    class SchedulerWeightUpdaterManager:
        def __init__(self) -> None:
            self.offload_tags: set[str] = set()

        def release_memory_occupation(self, request: Any) -> str:
            released.append(request.tags)
            self.offload_tags |= {*request.tags}
            return "released"

    memory.release_once(
        SimpleNamespace(
            SchedulerWeightUpdaterManager=SchedulerWeightUpdaterManager,
            GPU_MEMORY_ALL_TYPES=["kv_cache", "weights", "cuda_graph"],
            ReleaseMemoryOccupationReqOutput=lambda: "nothing to do",
        )
    )
    manager: Any = SchedulerWeightUpdaterManager()
    asked = [["kv_cache"], ["kv_cache", "weights"], ["weights"], None, None]
    answers = [manager.release_memory_occupation(SimpleNamespace(tags=tags)) for tags in asked]
    assert released == [["kv_cache"], ["weights"], ["cuda_graph"]]
    assert answers == ["released", "released", "nothing to do", "released", "nothing to do"]
