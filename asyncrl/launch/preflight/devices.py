"""Check of the requested GPUs against those that the machines report. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.launch.placement import Node, Placement
from asyncrl.launch.preflight.facts import MachineFacts
from asyncrl.launch.preflight.findings import Finding, error, ok, warning

SHOWN = 4
"""Number of machines that a finding names."""


def check_idle(nodes: Sequence[Node], placement: Placement) -> list[Finding]:
    """Warn of machines and GPUs of a job to which no process is assigned."""
    engines = [seat for seats in placement.engines for seat in seats]
    alone = (placement.router, placement.rollout, *placement.teachers, *placement.judges)
    seats = (*alone, *placement.trainers, *engines)
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
