"""Check of the memory that the ranks need, against that of their GPUs or machines. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asyncrl.extensions.plan.memory import away, turns
from asyncrl.launch.checks.findings import Finding, error, ok, warning
from asyncrl.launch.machine import MachineFacts
from asyncrl.launch.placement import Placement, Seat

CERTAIN = 0.5
"""Fraction of the estimated activations that is certainly needed; the rest only leads to a warning."""
TIGHT = 0.9
"""Fraction of a memory above which libraries and fragmentation may not leave enough room."""
ESTIMATED = "activations"
TRAINER, ENGINE = 301_000_000, 2 * 413_000_000
"""Bytes of a process after it has imported its libraries, measured with those of requirements/cpu.txt. An engine has
two processes, a server and a scheduler."""
OF_ENGINES = "Raise {0}.tensor_parallel, or lower {0}.max_total_tokens."
REMEDIES = {
    "trainer": "Set trainer.recompute or offload.activations, raise trainer.tensor_parallel, pipeline_parallel "
    "or data_parallel, lower trainer.micro_batch_tokens, or set weights.staging=stream.",
    "machine": "Take machines with more memory or more of them, fewer ranks or engines on each, or smaller "
    "engine.max_total_tokens and trainer.micro_batch_tokens.",
}
REMEDIES |= {
    "trainer's part": f"Lower it, or set cluster.placement=colocated. {REMEDIES['trainer']}",
    "engine's part": f"Raise it. {OF_ENGINES.format('engine')}",
}


@dataclass(frozen=True)
class MemoryNeed:
    """Memory that one rank of a role needs."""

    parts: Mapping[str, int]
    """Bytes by purpose, on its GPU, or in its machine's memory if it has none."""
    gpu: bool
    host: int = 0
    """Additional bytes in the machine's memory, with or without a GPU."""
    fraction: float | None = None
    """Its part of a GPU; None: all of it."""

    @property
    def total(self) -> int:
        """Return the estimated total."""
        return sum(self.parts.values())

    @property
    def certain(self) -> float:
        """Return a lower bound of the total."""
        return self.total - (1 - CERTAIN) * self.parts.get(ESTIMATED, 0)


def in_turns(trainer: MemoryNeed, engine: MemoryNeed) -> MemoryNeed:
    """Return the need of a trainer rank that shares its GPU with an engine rank (cluster.placement=colocated):
    that of the largest turn, and host memory for what leaves the GPU."""
    parts = dict(trainer.parts)
    largest = max(turns(parts, dict(engine.parts)).values(), key=lambda turn: sum(turn.values()))
    return MemoryNeed(largest, trainer.gpu, trainer.host + away(parts))


def check_memory(
    placement: Placement, needs: Mapping[str, MemoryNeed], machines: Mapping[str, MachineFacts]
) -> list[Finding]:
    """Check every role against its GPUs, and every machine against its processes. `needs` is by role, `machines` by
    node name. Unknown memory sizes are not compared."""
    ranks = {"trainer": placement.trainers, **placement.fleets}
    found = []
    for role, need in needs.items():
        if ranks[role]:
            found.append(_of_device(role, need, ranks[role], machines))
    used: defaultdict[str, float] = defaultdict(float)
    sure: defaultdict[str, float] = defaultdict(float)
    for role, need in needs.items():
        for seat in ranks[role]:
            # the seat of an engine on GPUs stands for all of its ranks there
            own = (need.host + (TRAINER if role == "trainer" else ENGINE)) * max(
                1, len(seat.gpus) if role != "trainer" else 1
            )
            used[seat.node.name] += own + (0 if need.gpu else need.total)
            sure[seat.node.name] += own + (0 if need.gpu else need.certain)
    known = {name: machines[name].memory for name in used if name in machines and machines[name].memory}
    judged = [
        _judged("memory", f"processes of {name or 'this machine'}", used[name], sure[name], size, "machine")
        for name, size in known.items()
    ]
    wrong = [one for one in judged if one.level != "ok"]
    return [*found, *(wrong or judged[:1])]


def _of_device(role: str, need: MemoryNeed, seats: Sequence[Seat], machines: Mapping[str, MachineFacts]) -> Finding:
    """Compare a rank with the smallest GPU that a rank of its role is placed on."""
    what = f"a rank of the {role}"
    parts = " (" + ", ".join(f"{part} {gb(size)}" for part, size in need.parts.items() if size) + ")"
    if not need.gpu:
        return ok(role, f"{what}: {gb(need.total)} GB of its machine's memory{parts}")
    sizes = [
        one.memory
        for seat in seats
        if seat.node.name in machines
        for one in machines[seat.node.name].visible(seat.node.gpus[place] for place in seat.gpus)
    ]
    if not sizes:
        return ok(role, f"{what}: {gb(need.total)} GB of a GPU whose memory size is unknown{parts}")
    if need.fraction is None:
        return _judged(f"{role}.tensor_parallel", what, need.total, need.certain, min(sizes), role, parts)
    room, what = int(need.fraction * min(sizes)), f"{what} in {need.fraction:.2f} of its GPU"
    return _judged("engine.memory_fraction", what, need.total, need.certain, room, f"{role}'s part", parts)


def _judged(field: str, what: str, total: float, certain: float, size: int, remedy: str, parts: str = "") -> Finding:
    text = f"{what}: {gb(total)} of {gb(size)} GB{parts}"
    how = REMEDIES.get(remedy) or OF_ENGINES.format(remedy)
    if certain > size:
        return error(field, text, how)
    return warning(field, text, how) if total > TIGHT * size else ok(field, text)


def gb(size: float) -> str:
    """Return bytes as GB, to three digits."""
    return f"{size / 1e9:.3g}"
