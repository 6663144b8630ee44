"""Settings of earlier versions that are gone, and why. results/log.md has the figures."""

from __future__ import annotations

LAST = "0a760499"
"""The last commit that has them."""
REMOVED = {
    "rollout.migrate_after": "Answers that move between engines gained 2.4 % at most",
    "rollout.migrate_below": "Answers no longer move between engines",
    **dict.fromkeys(
        ("engine.speculative", "engine.draft_model", "engine.draft_tokens"),
        "Speculative decoding is set by SGLang's own engine.server_args.speculative_*",
    ),
    **dict.fromkeys(
        ("engine.prefill_count", "engine.decode_count", "engine.transfer_backend"),
        "Engines that only prefill or only decode never ran on a GPU; every engine does both: set engine.count",
    ),
    "trainer.mtp": "Layers of multi-token prediction are not trained; exports contain them unchanged",
}
"""Why a setting, or a whole section, is gone."""


def why_removed(field: str) -> str | None:
    """Return the remedy for a setting that is gone; None for any other field."""
    for name, reason in REMOVED.items():
        if field == name or field.startswith(f"{name}."):
            return f"{reason}. It is gone: remove it, or use commit {LAST}, the last one that has it (results/log.md)."
    return None
