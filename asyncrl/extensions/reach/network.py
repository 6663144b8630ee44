"""Checks of the network between the machines of a job. Pure, except for the `ask` functions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from asyncrl.config import Config
from asyncrl.extensions.reach.programs import AllReduce, Reach, parse
from asyncrl.launch.checks.findings import Finding, error, ok
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Placement

REACH_SECONDS, SUM_SECONDS = 30.0, 60.0
"""Deadlines on the machines, once the programs have been started there."""
OPEN = "Set cluster.interface (or cluster.host) to a network on which the machines reach each other on all ports."


def ask_reach(
    cluster: Cluster, folders: Iterable[Path], models: Iterable[Path], run_id: str
) -> tuple[Reach, dict[str, dict[str, Any]]]:
    """Ask every machine whether it reaches the first one, and sees these folders, which exist. Folders that are not
    writable are skipped, since another check reports them."""
    first, *others = cluster.nodes
    marks: dict[str, Path] = {}
    try:
        for folder in folders:
            mark = folder / f".asyncrl-preflight-{run_id}"
            with suppress(OSError):
                mark.write_text(mark.name)
                marks[str(folder)] = mark
        reach = Reach(
            listener=first.name,
            address=first.address,
            port=first.ports[-1],  # cluster.OWN_PORTS
            others=[node.name for node in others],
            seconds=REACH_SECONDS,
            folders={folder: str(mark) for folder, mark in marks.items()},
            models={str(folder): (folder / "config.json").stat().st_size for folder in models},
        )
        mounts = [Path(folder) for folder in (*reach.folders, *reach.models)]
        outputs = cluster.everywhere([sys.executable, *reach.argv()], REACH_SECONDS, mounts=mounts)
        return reach, parse(outputs, [node.name for node in cluster.nodes])
    finally:
        for mark in marks.values():
            mark.unlink(missing_ok=True)


def check_reach(reach: Reach, answers: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Check that every other machine has reached the first one."""
    where = f"{reach.listener} ({reach.address}:{reach.port})"
    found = []
    for name in reach.others:
        answer = answers.get(name)
        problem = answer["problem"] if answer else "no answer"
        if problem:
            found.append(error("cluster.interface", f"no connection from {name} to {where}: {problem}", OPEN))
    if not found and (problem := answers.get(reach.listener, {"problem": "no answer"})["problem"]):
        found.append(error("cluster.interface", f"not all machines reach {where}: {problem}", OPEN))
    return found or [ok("network", f"{len(reach.others)} machine(s) reach {where}")]


def unseen(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the folders that each machine does not see."""
    return {name: list(answer["unseen"]) for name, answer in answers.items() if answer.get("unseen")}


def ask_allreduce(cluster: Cluster, placement: Placement, *, gpu: bool) -> tuple[AllReduce, dict[str, dict[str, Any]]]:
    """Run an all-reduce with one rank on each of the trainers' machines."""
    nodes = list(dict.fromkeys(seat.node for seat in placement.trainers))
    program = AllReduce(
        "nccl" if gpu else "gloo",
        [node.name for node in nodes],
        nodes[0].address,
        nodes[0].ports[-2],  # cluster.OWN_PORTS
        {node.name: node.interface for node in nodes},
        SUM_SECONDS,
    )
    outputs = cluster.everywhere([sys.executable, *program.argv()], SUM_SECONDS, nodes=program.names)
    return program, parse(outputs, program.names)


def check_allreduce(program: AllReduce, answers: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Check that every machine has the correct sum."""
    problems = {
        name: answers[name]["problem"] if name in answers else "no answer"
        for name in program.names
        if name not in answers or answers[name]["problem"]
    }
    used = ", ".join(f"{name}: {program.interfaces.get(name) or 'its own choice'}" for name in program.names)
    if problems:
        said = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        text = f"all-reduce over {program.backend} failed between {', '.join(program.names)}: {said}"
        remedy = f"Set cluster.interface to a network that connects all of them ({program.backend} used: {used})."
        return [error("cluster.interface", text, remedy)]
    slowest = max(float(answers[name]["seconds"]) for name in program.names)
    text = f"4 MiB over {program.backend} between {len(program.names)} machines in {slowest * 1000:.1f} ms ({used})"
    return [ok("all-reduce", text)]


def check_shared(
    config: Config, missing: Mapping[str, Sequence[str]], folder: str, models: Mapping[str, str]
) -> list[Finding]:
    """Check that all machines see the run folder, the folder of published files, and the model folders.
    `models` maps model folders to their settings; `missing` maps each machine to the folders that it does not see."""
    found = []
    for machine, paths in sorted(missing.items()):
        for path in paths:
            files = config.sends_files or config.keeps_versions
            by_files = path == folder and files
            field = models.get(path) or ("weights.folder" if by_files else "run.dir")
            text = f"on {machine}, {path} is not the folder that the first machine sees"
            found.append(error(field, text, "Choose a folder on a file system that all machines of the job share."))
    return found
