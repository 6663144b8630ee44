"""Settings of engines that SGLang 0.5.21 does not support on GPUs of some generations (read in its source)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from asyncrl.config import EngineConfig
from asyncrl.config.rules import Rule, require
from asyncrl.launch.placement import Node, Seat
from asyncrl.launch.preflight.facts import MachineFacts

AMPERE = ("A100", "A800", "A10", "A16", "A30", "A40", "RTX A", "RTX 30")
BLACKWELL = ("B100", "B200", "B300", "GB10", "RTX 50", "RTX PRO")
"""Parts of the names of GPUs."""


def check_generations(
    engine: EngineConfig, seats: Iterable[Seat], nodes: Sequence[Node], machines: Sequence[MachineFacts]
) -> None:
    """Refuse settings with which an engine dies at its start, or at its second version, on the GPUs of its seats.
    `machines` has what is known of `nodes`, in their order. Raises ConfigError."""
    known = {node.name: machine for node, machine in zip(nodes, machines, strict=False)}
    placed = [(known[seat.node.name], seat.visible.split(",")) for seat in seats if seat.node.name in known]
    for gpu in sorted({one.name for machine, visible in placed for one in machine.visible(visible)}):
        require(engine, _rules(engine, gpu), prefix="engine.")


def _rules(engine: EngineConfig, gpu: str) -> Iterator[Rule]:
    """Yield each rule as field, whether its value breaks it, and the remedy."""
    ampere, blackwell = (any(part in gpu for part in of) for of in (AMPERE, BLACKWELL))
    kind = engine.quantization
    why = f"SGLang rewrites fp8 weights on {gpu} into Marlin's layout, and no later version could be loaded"
    yield "quantization", kind == "fp8" and ampere, f"{why}: set int8, or fp8_simulated."
    why = f"SGLang rewrites the scales of fp8 weights for DeepGEMM on {gpu}, and no later version could be loaded"
    rewritten = kind == "fp8" and blackwell and engine.server_args.get("fp8_gemm_backend") != "triton"
    remedy = "set +engine.server_args.fp8_gemm_backend=triton, or engine.quantization=fp8_simulated."
    yield "quantization", rewritten, f"{why}: {remedy}"
    why = f"SGLang's kernels for int8 do not run on {gpu}"
    yield "quantization", kind == "int8" and blackwell, f"{why}: set fp8, or int8_simulated."
