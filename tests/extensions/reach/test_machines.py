"""What the machines of a run have is a finding with its field and what to do, and what is right is no fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.extensions.reach.machines import check_gpus, check_idle, check_ports
from asyncrl.extensions.reach.software import check_gpu_engines, check_gpu_trainers
from asyncrl.launch.checks.findings import Finding, failed
from asyncrl.launch.checks.run import preflight
from asyncrl.launch.checks.versions import pinned
from asyncrl.launch.prepare import Preparation
from tests.fakes import Machines
from tests.launch.checks.worlds import job, machine, nodes, of_job, placed


def gpu_engine(**changes: str | None) -> list[Finding]:
    return check_gpu_engines([machine(gpus=8), machine("node7", gpus=8, **changes)], pinned(gpu=True))  # type: ignore[arg-type]


def gpu_trainer(experts: bool = True, **changes: str | None) -> list[Finding]:
    return check_gpu_trainers([machine("node7", gpus=8, **changes)], pinned(gpu=True), experts=experts)  # type: ignore[arg-type]


def gpus(shown: int, used: int = 2) -> list[Finding]:
    return check_gpus(nodes(job(), 1, used), [machine(gpus=shown)])


def idle(machines: int, each: int, **changes: object) -> list[Finding]:
    config = job(**changes)
    return check_idle(nodes(config, machines, each), placed(config, machines, each))


FAULTS: dict[str, tuple[Callable[[], list[Finding]], str, str, str]] = {
    "an engine on a GPU without its kernels": (
        lambda: gpu_engine(sglang_kernel=None),
        *("versions", "sglang-kernel is not installed on node7", "requirements/gpu.txt"),
    ),
    "an engine on a GPU without a compiler": (
        lambda: gpu_engine(nvcc=""),
        *("nvcc", "node7 has no nvcc", "CUDA_HOME"),
    ),
    "fewer GPUs than are to be used": (
        lambda: gpus(shown=1),
        *("cluster.gpus", "shows 1 of the 2 GPUs 0,1", "Lower cluster.gpus"),
    ),
    "GPUs by names that the machine does not know": (
        lambda: check_gpus([replace(nodes(job(), 1, 2)[0], gpus=("6", "7"))], [machine(gpus=2)]),
        *("cluster.gpus", "shows 0 of the 2 GPUs 6,7", "Lower cluster.gpus"),
    ),
    "too few ports": (
        lambda: check_ports(nodes(job(), 1, 0), 99),
        *("cluster.host", "node0 has 6 free ports", "99 are needed"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_a_machine_is_found_with_field_and_remedy(fault: str) -> None:
    check, field, value, remedy = FAULTS[fault]
    (found,) = [one for one in check() if one.level == "error"]
    assert found.field == field
    assert value in found.value
    assert remedy in found.remedy


WELL: dict[str, Callable[[], list[Finding]]] = {
    "what engines on GPUs need": lambda: gpu_engine(),
    "what trainers on GPUs need": lambda: gpu_trainer(),
    "GPUs": lambda: gpus(shown=2),
    "no GPUs": lambda: gpus(shown=0, used=0),
    "a machine without GPUs beside one with": lambda: check_gpus(
        [*nodes(job(), 1, 0), *nodes(job(), 1, 2)], [machine(), machine(gpus=2)]
    ),
    "GPUs that are all used": lambda: idle(2, 2, **{"engine.count": 2, "trainer.data_parallel": 2}),
    "machines without GPUs that are all used": lambda: idle(2, 0),
    "ports": lambda: check_ports(nodes(job(), 2, 0), 6),
}


@pytest.mark.parametrize("case", WELL)
def test_machine_that_is_right_has_no_fault(case: str) -> None:
    assert {one.level for one in WELL[case]()} <= {"ok"}


WARNED: dict[str, tuple[Callable[[], list[Finding]], str]] = {
    "experts on GPUs without TransformerEngine": (
        lambda: gpu_trainer(
            transformer_engine=None, transformer_engine_torch=None, transformer_engine_cu13=None, experts=True
        ),
        "transformer-engine",
    ),
    "half a TransformerEngine": (lambda: gpu_trainer(transformer_engine_torch=None), "transformer-engine"),
    "another TransformerEngine": (lambda: gpu_trainer(transformer_engine="2.1"), "transformer-engine"),
    "another flashinfer": (lambda: gpu_engine(flashinfer_python="0.5"), "versions"),
    "no nvidia-smi": (lambda: gpus(shown=0), "cluster.gpus"),
    "GPUs of two sizes": (
        lambda: check_gpus(nodes(job(), 2, 2), [machine(gpus=2), machine("node1", gpus=2, gb=40)]),
        "cluster.gpus",
    ),
    "an idle GPU": (lambda: idle(2, 2, **{"trainer.data_parallel": 2, "engine.count": 1}), "cluster.nodes"),
    "an idle machine": (lambda: idle(3, 2, **{"trainer.data_parallel": 2, "engine.count": 2}), "cluster.nodes"),
    "an idle machine without GPUs": (lambda: idle(4, 0), "cluster.nodes"),
}


@pytest.mark.parametrize("case", WARNED)
def test_what_a_machine_may_lack_is_a_warning_with_a_remedy(case: str) -> None:
    check, field = WARNED[case]
    findings = check()
    assert not failed(findings)
    (found,) = [one for one in findings if one.level == "warning"]
    assert (found.field, bool(found.remedy)) == (field, True)


def test_what_is_used_of_the_gpus_is_told() -> None:
    assert [one.value for one in gpus(shown=0, used=0)] == ["no GPU is used"]
    assert [one.value for one in gpus(shown=4, used=0)] == ["no GPU is used; the 4 visible GPUs stay unused"]
    (two,) = check_gpus([*nodes(job(), 1, 0), *nodes(job(), 2, 2)], [machine(), *[machine(gpus=2)] * 2])
    assert two.value == "2 GPU(s) on each of 2 machine(s): NVIDIA H100 80GB HBM3"


def test_idle_gpus_and_machines_are_named() -> None:
    (one,) = idle(3, 2, **{"trainer.data_parallel": 1, "engine.count": 2})
    assert one.value == "no process uses 1 of the 2 GPUs of node1, 2 of the 2 GPUs of node2"
    (many,) = idle(9, 2, **{"trainer.data_parallel": 2, "engine.count": 2})
    assert many.value.endswith("2 of the 2 GPUs of node5, and 3 more")


def test_addresses_of_ports_are_bounded() -> None:
    (four,), (five,) = (check_ports(nodes(job(), count, 0), 6) for count in (4, 5))
    assert four.value.endswith("10.0.0.2, 10.0.0.3")
    assert five.value.endswith("10.0.0.2, 10.0.0.3, ...")


def test_parts_on_gpus_are_checked_on_the_machines_that_run_them(tmp_path: Path) -> None:
    config = job(**{"trainer.device": "cpu"})
    machines = [machine("node0", gpus=1, nvcc="", transformer_engine=None)]
    allocation = Machines(config, nodes(config, 1, 1), machines)
    told = preflight(Preparation(config, tmp_path / "run", allocation))
    findings = {one.field: one for one in told}
    assert findings["nvcc"].level == "error"
    assert "node0 has no nvcc" in findings["nvcc"].value
    assert "transformer-engine" not in findings  # no trainer runs on a GPU
    assert "nvcc" not in of_job(tmp_path, 1)
