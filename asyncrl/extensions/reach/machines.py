"""Checks of the machines of a run: their GPUs and ports, and whether it uses all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from asyncrl.launch.checks.findings import Finding, error, ok, warning
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.placement import Node, Placement

SHOWN = 4
"""Number of machines that a finding names."""


def check_idle(nodes: Sequence[Node], placement: Placement) -> list[Finding]:
    """Warn of machines and GPUs of a job to which no process is assigned."""
    seats = (placement.router, placement.rollout, *placement.trainers, *chain(*placement.fleets.values()))
    found = []
    for node in nodes:
        used = {place for seat in seats if seat.node.name == node.name for place in seat.gpus}
        if node.gpus and len(used) < len(node.gpus):
            found.append(f"{len(node.gpus) - len(used)} of the {len(node.gpus)} GPUs of {node.name}")
        elif not node.gpus and not any(seat.node.name == node.name for seat in seats):
            found.append(f"machine {node.name}")
    if not found:
        return []
    remedy = (
        "Raise engine.count or trainer.data_parallel, or take fewer machines (cluster.nodes) or GPUs (cluster.gpus)."
    )
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return [warning("cluster.nodes", f"no process uses {', '.join(found[:SHOWN])}{more}", remedy)]


def check_ports(nodes: Sequence[Node], wanted: int) -> list[Finding]:
    """Check that every machine has enough free ports."""
    remedy = f"{wanted} are needed: stop what listens there, or set cluster.host to another address."
    found = [
        error("cluster.host", f"{node.name} has {len(node.ports)} free ports at {node.address}", remedy)
        for node in nodes
        if len(node.ports) < wanted
    ]
    where = ", ".join(node.address for node in nodes[:SHOWN]) + (", ..." if len(nodes) > SHOWN else "")
    return found or [ok("ports", f"{wanted} free on each of {len(nodes)} machine(s), at {where}")]


def check_gpus(nodes: Sequence[Node], machines: Sequence[MachineFacts]) -> list[Finding]:
    """Check the GPUs of each machine. `nodes` and `machines` are in the same order."""
    if not any(node.gpus for node in nodes):
        idle = sum(len(machine.gpus) for machine in machines)
        note = f"; the {idle} visible GPUs stay unused" if idle else ""
        return [ok("cluster.gpus", f"no GPU is used{note}")]
    found, models = [], set()
    for node, machine in zip(nodes, machines, strict=True):
        if not node.gpus:
            continue
        visible = machine.visible(node.gpus)
        models |= {(one.name, one.memory) for one in visible}
        if not machine.gpus:
            remedy = "Is the driver installed? Without nvidia-smi neither their number nor their memory can be checked."
            found.append(warning("cluster.gpus", f"{_named(machine)}: nvidia-smi lists no GPU", remedy))
        elif len(visible) < len(node.gpus):
            text = f"{_named(machine)} shows {len(visible)} of the {len(node.gpus)} GPUs {','.join(node.gpus)}"
            remedy = "Lower cluster.gpus, or take machines with more."
            found.append(error("cluster.gpus", text, remedy))
    if len(models) > 1:
        kinds = ", ".join(sorted(f"{name} ({memory >> 20} MiB)" for name, memory in models))
        remedy = "The slowest GPU sets the pace and the smallest the memory: use machines of one kind."
        found.append(warning("cluster.gpus", f"the GPUs are of different kinds: {kinds}", remedy))
    each = max(len(node.gpus) for node in nodes)
    kind = next(iter(sorted(models)), ("unknown", 0))[0]
    return found or [
        ok("cluster.gpus", f"{each} GPU(s) on each of {sum(bool(n.gpus) for n in nodes)} machine(s): {kind}")
    ]


def _named(machine: MachineFacts) -> str:
    return machine.name or "this machine"
