"""What docs/models.md says of each family, from its record."""

from __future__ import annotations

from asyncrl.models.family import Family


def cells(family: Family) -> list[str]:
    """Return the cells of a family's row after its name and models."""
    sees, serving = family.tower is not None, family.serving
    merged = "merged only" if family.adapters else "no"
    experts = any("{expert}" in weight.megatron for weight in family.weights)
    reported = "yes" if serving.reports_experts else "no: SGLang's layers do not report their numbers"
    reported = "no: answers count an image once" if sees else reported
    own = "own" if serving.fuses else "transformers'"
    coded = "simulated" if sees or not serving.fuses else "yes"
    return [
        "text model; vision tower frozen or trained" if sees else "yes",
        ("yes, on the text model" if sees else "yes") if family.adapters else "no",
        "yes" if serving.adapters else merged,
        reported if experts else "–",
        own if serving.on_cpu else f"{own} (weights)",
        coded if family.adapters and not family.stacks else "no",
    ]
