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
    "metrics.trackio": "trackio needs an older pillow than asyncrl; use tensorboard, wandb or mlflow",
    "trainer.mtp": "Layers of multi-token prediction are not trained; exports contain them unchanged",
}
"""Why a setting, or a whole section, is gone."""
VALUES = {
    ("metrics.sinks", "trackio"): "trackio needs an older pillow than asyncrl; use tensorboard, wandb or mlflow",
    ("trainer.token_dispatcher", "hybridep"): "HybridEP was never executed; deepep is the dispatcher with kernels",
}
"""Why a value of a setting that remains is gone."""


def why_removed(field: str, value: object = None) -> str | None:
    """Return the remedy for a setting, or a value of it, that is gone; None for any other."""
    gone = dict(REMOVED)
    if isinstance(value, str) and (reason := VALUES.get((field, value))):
        gone[field] = reason
    for name, reason in gone.items():
        if field == name or field.startswith(f"{name}."):
            return f"{reason}. It is gone: remove it, or use commit {LAST}, the last one that has it (results/log.md)."
    return None
