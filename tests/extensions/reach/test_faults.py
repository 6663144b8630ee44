"""What machines tell of each other is a finding with its field and what to do, and what is right is no fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.extensions.reach.network import check_allreduce, check_reach, check_shared
from asyncrl.extensions.reach.programs import AllReduce, Reach
from asyncrl.extensions.reach.versions import check_versions
from asyncrl.launch.checks.findings import Finding, failed, rendered
from asyncrl.launch.checks.versions import pinned
from tests.launch.checks.worlds import job, machine

REACH = Reach("node0", "10.0.0.0", 20000, ["node1", "node2"], 30.0, {}, {})
SUM = AllReduce("gloo", ["node0", "node1"], "10.0.0.0", 20001, {"node0": "eth0", "node1": "ib0"}, 60.0)


def reached(**answers: str | None) -> list[Finding]:
    told = {name: {"node": name, "problem": ""} for name in ("node0", "node1", "node2")}
    for name, problem in answers.items():
        if problem is None:
            del told[name]
        else:
            told[name]["problem"] = problem
    return check_reach(REACH, told)


def summed(**answers: str | None) -> list[Finding]:
    told = {name: {"node": name, "problem": "", "seconds": 0.001} for name in SUM.names}
    for name, problem in answers.items():
        if problem is None:
            del told[name]
        else:
            told[name] = {"node": name, "problem": problem}
    return check_allreduce(SUM, told)


def versions(**changes: str) -> list[Finding]:
    return check_versions([machine(**changes)], pinned())


FAULTS: dict[str, tuple[Callable[[], list[Finding]], str, str, str]] = {
    "a wrong version of what we reach into": (
        lambda: versions(sglang="0.4.0"),
        *("versions", "sglang 0.4.0 is installed, but asyncrl requires", "asyncrl-install"),
    ),
    "a package that is missing": (
        lambda: check_versions([machine()], {**pinned(), "xgrammar": "1.0"}),
        *("versions", "xgrammar is not installed", "asyncrl-install"),
    ),
    "versions that differ between machines": (
        lambda: check_versions([machine(), machine("node7", torch="2.12.0")], pinned()),
        *("versions", "node0 and node7 differ: torch", "the same environment"),
    ),
    "a package that one machine alone has": (
        lambda: check_versions([machine(), machine("node7", flashinfer="0.2")], pinned()),
        *("versions", "flashinfer missing and 0.2", "the same environment"),
    ),
    "a machine that does not reach the first": (
        lambda: reached(node2="cannot reach 10.0.0.0:20000: timed out"),
        *("cluster.interface", "no connection from node2 to node0 (10.0.0.0:20000): cannot reach", "cluster.interface"),
    ),
    "a machine that does not answer": (
        lambda: reached(node1=None),
        *("cluster.interface", "no connection from node1 to node0 (10.0.0.0:20000): no answer", "cluster.interface"),
    ),
    "an all-reduce that fails": (
        lambda: summed(node1="Connection refused"),
        *(
            "cluster.interface",
            "all-reduce over gloo failed between node0, node1: node1: Connection refused",
            "node1: ib0",
        ),
    ),
    "an all-reduce that never ends": (
        lambda: summed(node0="it did not finish within 60 s", node1=None),
        *("cluster.interface", "node0: it did not finish within 60 s; node1: no answer", "cluster.interface"),
    ),
    "a folder for weights that is not shared": (
        lambda: check_shared(job(**{"weights.transport": "disk"}), {"node1": ["/scratch"]}, "/scratch", {}),
        *("weights.folder", "on node1, /scratch is not the folder", "all machines"),
    ),
    "a model that one machine lacks": (
        lambda: check_shared(job(), {"node1": ["/models/it"]}, "/tmp", {"/models/it": "model.path"}),
        *("model.path", "on node1, /models/it is not the folder", "all machines"),
    ),
    "a run folder that is not shared beside weights that are": (
        lambda: check_shared(job(**{"weights.transport": "disk"}), {"node1": ["/runs"]}, "/scratch", {}),
        *("run.dir", "on node1, /runs is not the folder", "all machines"),
    ),
    "a first machine that could not listen": (
        lambda: reached(node0="Address already in use"),
        *("cluster.interface", "node0 (10.0.0.0:20000): Address already in use", "cluster.interface"),
    ),
    "a first machine that does not answer": (
        lambda: reached(node0=None),
        *("cluster.interface", "not all machines reach node0 (10.0.0.0:20000): no answer", "cluster.interface"),
    ),
    "a run folder that is not shared": (
        lambda: check_shared(job(), {"node1": ["/tmp"]}, "/tmp", {}),
        *("run.dir", "on node1, /tmp is not the folder", "all machines"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_between_machines_is_found_with_field_and_remedy(fault: str) -> None:
    check, field, value, remedy = FAULTS[fault]
    findings = check()
    (found,) = {one for one in findings if one.level == "error"}
    assert found.field == field
    assert value in found.value
    assert remedy in found.remedy
    assert found.remedy in " ".join(rendered(findings).split())


WELL: dict[str, Callable[[], list[Finding]]] = {
    "reach": lambda: reached(),
    "sum": lambda: summed(),
    "shared folders": lambda: check_shared(job(), {}, "/tmp", {}),
    "versions": lambda: versions(),
    "a build of the right version": lambda: versions(torch=f"{pinned()['torch']}+cpu"),
    "the same on two machines": lambda: check_versions([machine(), machine("node1")], pinned()),
}


@pytest.mark.parametrize("case", WELL)
def test_what_is_right_between_machines_is_no_fault(case: str) -> None:
    assert {one.level for one in WELL[case]()} <= {"ok"}


def test_slowest_machine_of_a_sum_is_told() -> None:
    told = {name: {"node": name, "problem": "", "seconds": seconds} for name, seconds in (("node0", 1), ("node1", 2))}
    assert "in 2000.0 ms" in check_allreduce(SUM, told)[0].value


def test_a_fault_of_one_machine_is_told_once() -> None:
    """If others cannot reach the first machine, its own report is not a second fault."""
    assert len(reached(node0="no connection came from ['node2']", node2="timed out")) == 1


def test_another_version_of_a_stable_package_is_a_warning() -> None:
    findings = versions(transformers="5.0.0")
    assert not failed(findings)
    (found,) = [one for one in findings if one.level == "warning"]
    assert (found.field, bool(found.remedy)) == ("versions", True)
