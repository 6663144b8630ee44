"""Memory and disk checks count every byte that ranks and files take once, on the right machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.extensions.plan.folders import FolderState, SpaceNeeded, StoredBytes, check_folders, look_at, room_of
from asyncrl.extensions.plan.memory_check import MemoryNeed, check_memory, in_turns
from asyncrl.launch.checks.findings import Finding, failed
from asyncrl.launch.machine import Gpu, MachineFacts
from tests.fakes import ALONE
from tests.launch.checks.worlds import GB, job, machine, placed

# -- memory --------------------------------------------------------------------------------------------------------

SCORERS = {"extensions.scorers": "tests.fakes:Scorers"}


def levels(findings: list[Finding]) -> dict[str, str]:
    return {one.field: one.level for one in findings}


def on_one(needs: dict[str, MemoryNeed], here: MachineFacts, gpus: int = 2, **changes: Any) -> dict[str, str]:
    return levels(check_memory(placed(job(**changes), 1, gpus), needs, {"node0": here}))


def gb(size: float, *, gpu: bool = True, host: float = 0, part: str = "weights") -> MemoryNeed:
    return MemoryNeed({part: int(size * GB)}, gpu, int(host * GB))


def test_what_lies_on_a_gpu_takes_no_memory_of_the_machine() -> None:
    assert on_one({"trainer": gb(60), "engine": gb(60)}, machine(gpus=2, ram=4))["memory"] == "ok"
    assert on_one({"trainer": gb(60, gpu=False)}, machine(gpus=2, ram=4))["memory"] == "error"


def test_what_a_checkpoint_stages_is_the_machines_for_every_rank() -> None:
    needs, shape = {"trainer": gb(10, host=10)}, {"trainer.data_parallel": 2, "engine.device": "cpu"}
    assert on_one(needs, machine(gpus=2, ram=30), **shape)["memory"] == "ok"
    assert on_one(needs, machine(gpus=2, ram=20), **shape)["memory"] == "error"  # 2 x 10, and the processes


def test_caches_in_host_memory_of_all_ranks_of_an_engine_count() -> None:
    needs, shape = {"engine": gb(1, host=20)}, {"engine.tensor_parallel": 4}
    assert on_one(needs, machine(gpus=5, ram=100), 5, **shape)["memory"] == "ok"
    assert on_one(needs, machine(gpus=5, ram=75), 5, **shape)["memory"] == "error"


def test_processes_of_all_ranks_of_an_engine_count() -> None:
    """Four of 0.83 GB, and 0.30 of a trainer."""
    needs, shape = {"trainer": gb(1), "engine": gb(1)}, {"engine.tensor_parallel": 4}
    assert on_one(needs, machine(gpus=5, ram=4.5), 5, **shape)["memory"] == "ok"
    assert on_one(needs, machine(gpus=5, ram=3.0), 5, **shape)["memory"] == "error"


def test_parts_of_an_engine_are_on_each_of_its_machines() -> None:
    config = job(**{"engine.tensor_parallel": 8, "cluster.trainer_nodes": 1, "trainer.data_parallel": 4})
    machines = {f"node{number}": machine(f"node{number}", gpus=4, ram=500) for number in range(3)}
    machines["node2"] = machine("node2", gpus=4, ram=2)
    found = check_memory(placed(config, 3, 4), {"trainer": gb(1), "engine": gb(1)}, machines)
    (wrong,) = [one for one in found if one.level != "ok"]
    assert wrong.value.startswith("processes of node2: ")


def test_rank_is_held_to_its_gpu_and_the_smallest_of_a_kind() -> None:
    cards = tuple(Gpu(number, "it", int(size * GB), f"GPU-{number}") for number, size in enumerate((80, 80, 40)))
    here = replace(machine(), gpus=cards)
    needs = {"trainer": gb(60), "engine": gb(60)}
    assert on_one(needs, here) == {"trainer.tensor_parallel": "ok", "engine.tensor_parallel": "ok", "memory": "ok"}
    assert on_one(needs, here, 3, **{"engine.count": 2})["engine.tensor_parallel"] == "error"


def test_what_is_not_known_is_not_compared() -> None:
    assert on_one({"engine": gb(60)}, MachineFacts("node0")) == {"engine": "ok"}
    assert on_one({"engine": gb(60)}, replace(machine(), gpus=())) == {"engine": "ok", "memory": "ok"}


def test_who_is_not_started_needs_nothing() -> None:
    assert on_one({"scorer": gb(600), "trainer": gb(1)}, machine(gpus=2), **SCORERS) == {
        "trainer.tensor_parallel": "ok",
        "memory": "ok",
    }


def test_roomy_machines_share_a_line_and_others_have_one() -> None:
    config = job(**{"trainer.data_parallel": 2, "cluster.trainer_nodes": 2, "engine.device": "cpu"})

    def lines(*ram: float) -> list[str]:
        machines = {f"node{number}": machine(f"node{number}", gpus=1, ram=size) for number, size in enumerate(ram)}
        found = check_memory(placed(config, 2, 1), {"trainer": gb(1, host=10)}, machines)
        return [one.level for one in found if one.field == "memory"]

    assert lines(100, 100) == ["ok"]
    assert lines(5, 5) == ["error", "error"]
    assert lines(100, 5) == ["error"]
    assert lines(11, 100) == ["warning"]


def test_half_of_the_activations_and_all_else_are_certain() -> None:
    parts = {"weights": 50 * GB, "activations": 50 * GB}
    assert (MemoryNeed(parts, True).total, MemoryNeed(parts, True).certain) == (100 * GB, 75 * GB)
    assert MemoryNeed({"weights": GB, "logits": 0}, True).certain == GB
    found = check_memory(placed(job(), 1, 2), {"trainer": MemoryNeed({**parts, "logits": 0}, True)}, {})
    assert found[0].value.endswith("(weights 50, activations 50)")


# -- disks -----------------------------------------------------------------------------------------------------------

ONE = 12 * GB
"""A checkpoint of a thousand million parameters."""


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"checkpoint": ONE, "checkpoints": 0, "weights": 4 * GB, "published": 0, "recorded": 0}),
        ({"trainer.dtype": "bfloat16"}, {"checkpoint": ONE, "weights": 2 * GB}),
        ({"algo.advantage": "gae"}, {"checkpoint": 2 * ONE}),
        ({"checkpoint.every": 5, "checkpoint.keep_last": 2}, {"checkpoints": 3 * ONE}),
        # 0, 10 and 20 of those that there are stay for good
        ({"checkpoint.every": 5, "checkpoint.keep_every": 10, "run.max_steps": 20}, {"checkpoints": (3 + 3) * ONE}),
        ({"trainer.save_hf_every": 5, "run.max_steps": 20}, {"weights": 5 * 4 * GB}),
        ({"weights.transport": "disk"}, {"published": 3 * 4 * GB}),
        (ALONE, {"checkpoint": 0, "weights": 0}),
        ({"record": True, "run.max_steps": 10}, {"recorded": 10 * 16 * 16 * 3 * 6, "journal": 0}),
        # ten batches since the last but one checkpoint, and twice the one in training and those of three versions
        (
            {"checkpoint.every": 5, "rollout.max_staleness": 2, "run.max_steps": 20},
            {"journal": (10 + 2 * (1 + 3)) * 16 * 16 * 3 * 14},
        ),
        ({"checkpoint.every": 5, "cluster.on_death": "end"}, {"journal": 0}),
    ],
)
def test_bytes_that_a_run_writes_follow_from_its_settings(changes: dict[str, Any], expected: dict[str, int]) -> None:
    room = room_of(job(**changes), GB)
    assert {name: getattr(room, name) for name in expected} == expected


def test_merged_weights_are_written_beside_adapters() -> None:
    stored = StoredBytes(checkpoint=3, folder=5)
    for merged, size in ((False, 5), (True, 5 + 4 * GB)):
        config = job(**{"trainer.lora.rank": 8, "trainer.lora.save_merged": merged, "run.max_steps": 9})
        assert room_of(config, GB, stored).weights == size


def test_recordings_are_at_most_those_of_the_largest_groups() -> None:
    config = job(record=True, **{"run.max_steps": 1})
    task = config.mixture[next(iter(config.mixture))]
    both = {"small": task.model_copy(update={"group_size": 2}), "large": task.model_copy(update={"group_size": 40})}
    assert room_of(config.model_copy(update={"tasks": both}), GB).recorded == 16 * 40 * 3 * 6


ROOM = SpaceNeeded(
    checkpoint=ONE, checkpoints=3 * ONE, weights=4 * GB, published=6 * GB, recorded=12 * GB, journal=8 * GB
)


def disk(free: float, *, held: float = 0, speed: float = 1e9, shared: float | None = None, **changes: Any) -> Any:
    run = FolderState(Path("/runs/it"), "", int(free * GB), speed, int(held * GB))
    other = None if shared is None else FolderState(Path("/shared"), "", int(shared * GB), speed)
    return levels(check_folders(job(**{"checkpoint.every": 5, **changes}), ROOM, run, other))


def test_what_is_there_already_is_written_over() -> None:
    assert disk(46.04)["run.dir"] == "error"  # 36 + 4 + 6, and what is spared
    assert disk(46.07)["run.dir"] == "warning"  # recordings and the journal may fill it
    assert disk(66.07)["run.dir"] == "ok"
    assert disk(46.07, held=20)["run.dir"] == "ok"
    assert disk(10.07, held=99)["run.dir"] == "warning"


def test_weights_on_their_way_lie_in_their_named_folder() -> None:
    assert disk(60.07, shared=6.07) == {"run.dir": "ok", "weights.folder": "ok", "checkpoint.every": "ok"}
    assert disk(60.07, shared=6.05)["weights.folder"] == "error"


def test_a_checkpoint_is_written_by_all_ranks() -> None:
    """A tenth of a GB in a second for each of them."""
    assert "checkpoint.timeout" in disk(99, speed=1e8, **{"checkpoint.timeout": 100.0})
    shape = {"checkpoint.timeout": 100.0, "trainer.data_parallel": 2}
    assert "checkpoint.every" in disk(99, speed=1e8, **shape)


def test_shared_gpu_holds_the_largest_turn() -> None:
    config = job(
        **{"cluster.placement": "colocated", "weights.pause_mode": "retract", "rollout.max_staleness": 1},
    )
    parts = {"weights": 16, "gradients": 16, "masters": 8, "moments": 16, "publish buckets": 1}
    parts |= {"frozen base": 0, "frozen weights": 0}
    trainer = MemoryNeed({part: int(size * GB) for part, size in parts.items()}, True)
    engine = MemoryNeed({"weights": int(16 * GB), "KV cache": int(40 * GB)}, True)
    needs = {"trainer": in_turns(trainer, engine), "engine": engine}

    def found(size: float, ram: float) -> dict[str, str]:
        here = replace(machine(gpus=1, ram=ram), gpus=(Gpu(0, "it", int(size * GB), "GPU-0"),))
        return levels(check_memory(placed(config, 1, 1), needs, {"node0": here}))

    assert found(70, 60) == {"trainer.tensor_parallel": "ok", "engine.tensor_parallel": "ok", "memory": "ok"}
    assert found(56.5, 60)["trainer.tensor_parallel"] == "error"  # 57 while trainers work, and while engines generate
    assert found(70, 40)["memory"] == "error"  # 16 + 8 + 16, and the processes


def test_gpu_that_is_shared_side_by_side_holds_each_in_its_part() -> None:
    config = job(**{"cluster.placement": "shared", "engine.memory_fraction": 0.25})
    here = {"node0": machine(gpus=1, gb=100)}

    def found(trainer: float, engine: float) -> list[Finding]:
        needs = {
            "trainer": replace(gb(trainer), fraction=config.trainer_fraction),
            "engine": replace(gb(engine), fraction=config.engine_fraction),
        }
        return [one for one in check_memory(placed(config, 1, 1), needs, here) if one.level != "ok"]

    assert not found(58, 22)
    (trainer,) = found(66, 22)  # 65 = 100 x (0.9 - 0.25)
    assert (trainer.field, trainer.level) == ("engine.memory_fraction", "error")
    assert "a rank of the trainer in 0.65 of its GPU: 66 of 65 GB" in trainer.value
    assert "Lower it" in trainer.remedy
    (engine,) = found(58, 26)
    assert (engine.field, engine.level) == ("engine.memory_fraction", "error")
    assert "a rank of the engine in 0.25 of its GPU: 26 of 25 GB" in engine.value
    assert "Raise it" in engine.remedy


# -- every fault with its remedy -----------------------------------------------------------------------------------


def memory(role: str, gb: float, gpu: bool = True, part: str = "weights", ram: float = 500) -> list[Finding]:
    """A rank of so many GB on a GPU of 80, or in a machine's memory."""
    config = job()
    count, gpus = (1, 2) if gpu else (1, 0)
    needs = {role: MemoryNeed({part: int(gb * GB)}, gpu)}
    return check_memory(placed(config, count, gpus), needs, {"node0": machine(gpus=gpus, ram=ram)})


def folder(
    free: float, parameters: float = 1e9, *, problem: str = "", speed: float = 1e9, **changes: object
) -> list[Finding]:
    config = job(**{"checkpoint.every": 10, **changes})
    run = FolderState(Path("/runs/it"), problem, int(free * GB), speed)
    return check_folders(config, room_of(config, int(parameters)), run, None)


FAULTS: dict[str, tuple[Callable[[Path], list[Finding]], str, str, str]] = {
    "too little memory of a GPU for the trainer": (
        lambda _: memory("trainer", 81),
        *("trainer.tensor_parallel", "81 of 80 GB", "trainer.micro_batch_tokens"),
    ),
    "activations that cannot fit": (
        lambda _: memory("trainer", 170, part="activations"),
        *("trainer.tensor_parallel", "170 of 80 GB", "trainer.micro_batch_tokens"),
    ),
    "too little memory of a GPU for the engine": (
        lambda _: memory("engine", 90),
        *("engine.tensor_parallel", "90 of 80 GB", "engine.max_total_tokens"),
    ),
    "too little memory of a machine": (
        lambda _: memory("trainer", 20, gpu=False, ram=16),
        *("memory", "of 16 GB", "machines with more memory"),
    ),
    "a folder that cannot be written": (
        lambda _: folder(100, problem="/runs: Permission denied"),
        *("run.dir", "Permission denied", "a writable folder"),
    ),
    "a file in the place of the folder": (
        lambda tmp: (
            (tmp / "file").touch()
            or check_folders(job(), room_of(job(), 10), look_at(tmp / "file" / "run", 1 << 20), None)
        ),
        *("run.dir", "is a file", "a writable folder"),
    ),
    "a disk too small for checkpoints": (
        lambda _: folder(37),  # three of 12 GB, and the weights at the end
        *("run.dir", "checkpoints 36", "40.1 GB are needed"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_want_of_room_is_found_with_field_and_remedy(fault: str, tmp_path: Path) -> None:
    check, field, value, remedy = FAULTS[fault]
    (found,) = {one for one in check(tmp_path) if one.level == "error"}
    assert found.field == field
    assert value in found.value
    assert remedy in found.remedy


WELL: dict[str, Callable[[], list[Finding]]] = {
    "memory of a GPU": lambda: memory("trainer", 60),
    "memory of a machine": lambda: memory("engine", 60, gpu=False),
    "a disk": lambda: folder(41),
}


@pytest.mark.parametrize("case", WELL)
def test_room_that_suffices_is_no_fault(case: str) -> None:
    assert {one.level for one in WELL[case]()} <= {"ok"}


WARNED: dict[str, tuple[Callable[[], list[Finding]], str]] = {
    "memory with nothing to spare": (lambda: memory("trainer", 75), "trainer.tensor_parallel"),
    "activations that may not fit": (lambda: memory("trainer", 100, part="activations"), "trainer.tensor_parallel"),
    "recordings that may fill the disk": (
        lambda: folder(41, record=True, **{"run.max_steps": 10**6, "rollout.max_new_tokens": 60}),
        "run.dir",
    ),
    "a checkpoint slower than its time": (lambda: folder(41, speed=1e6), "checkpoint.timeout"),
}


@pytest.mark.parametrize("case", WARNED)
def test_room_that_may_not_suffice_is_a_warning_with_a_remedy(case: str) -> None:
    check, field = WARNED[case]
    findings = check()
    assert not failed(findings)
    (found,) = [one for one in findings if one.level == "warning"]
    assert (found.field, bool(found.remedy)) == (field, True)
