"""Settings that asyncrl no longer has, and why; `results/log.md` says what each gave. Settings with another name.

This module imports nothing, so that the command can refuse them before it imports pydantic.
"""

from __future__ import annotations

LAST = "0a760499"
"""A commit that has all of them; the log names the last one for each."""

_SPECULATION = "speculative decoding is set by SGLang's own engine.server_args.speculative_*"
_TRACKIO = "trackio needs an older pillow than asyncrl; use tensorboard, wandb or mlflow"
_DUTIES = "engines that only prefill or only decode were never seen to gain; every engine does both: set engine.count"
_RECIPE = "it is the recipe sample_reuse now (recipes/sample_reuse/README.md): take experiment=sample_reuse as a model"
REMOVED = {
    "rollout.migrate_after": "answers that move between engines gained 2.4 % at most",
    "rollout.migrate_below": "answers no longer move between engines",
    "rollout.replacement": "a replacement in a rejected group's slot made batches wait, for 42 % of the throughput",
    "rollout.start_order": "another order of starts gained 1.3 % at most, with lengths known exactly",
    "engine.speculative": _SPECULATION,
    "engine.draft_model": _SPECULATION,
    "engine.draft_tokens": _SPECULATION,
    "engine.prefill_count": _DUTIES,
    "engine.decode_count": _DUTIES,
    "engine.transfer_backend": _DUTIES,
    "trainer.token_dispatcher=hybridep": "HybridEP was never executed; deepep is the dispatcher with kernels",
    "sinks.names=trackio": _TRACKIO,
    "metrics.trackio": _TRACKIO,
    "cluster.lend": "loans of the trainers' GPUs gained 0 to 34 % in simulation, and none ran on a GPU",
    "algo.replay_groups": _RECIPE,
    "algo.reset_every": _RECIPE,
    "algo.reset_share": _RECIPE,
    "trainer.megatron": "only the size of a bucket was ever set: it is trainer.grad_bucket_size now",
    "trainer.mtp": "layers of multi-token prediction are no longer trained; exports contain them unchanged",
}
"""Why a setting, a whole section, or one value of a setting (as NAME=VALUE) was removed."""

MOVED = {
    "asyncrl.agents.proxied": "asyncrl.extensions.proxy.agents",
    "asyncrl.envs.shell": "asyncrl.extensions.tools.shell",
    "asyncrl.envs.tools": "asyncrl.extensions.tools",
    "asyncrl.envs.toys": "asyncrl.extensions.games.higher_lower",
    "asyncrl.sandbox": "asyncrl.extensions.sandbox",
}
"""New names of modules and packages that settings name."""


def moved(module: str) -> str | None:
    """Return the new name of a module; None if it has not moved."""
    package, _, name = module.rpartition(".")
    return MOVED.get(module) or (f"{MOVED[package]}.{name}" if package in MOVED else None)


_SLURM = ("submit", "time", "requeues", "sbatch", "setup", "srun", "container")
MOVED_SETTINGS = {
    "trainer.activation_offload": "offload.activations",
    "trainer.optimizer.offload": "offload.optimizer",
    "trainer.profile": "observe.profile",
    "engine.quantization": "quantized.format",
    "engine.request_fields": "requests.fields",
    "algo.distillation": "distill",
    "algo.routing_replay": "routing_replay.kind",
    "algo.critic": "critic",
    "trainer.vision": "vision",
    "rollout.images": "vision",
    "tracing": "observe",
    "cluster.plan": "plan.apply",
    **{f"cluster.{name}": f"plan.{name}" for name in ("elastic", "min_engines", "max_engines")},
    "rollout.processes": "processes.count",
    "rollout.curriculum": "curriculum.function",
    "cluster.on_trainer_death": "cluster.on_death",
    "metrics.sinks": "sinks.names",
    "metrics.timeline": "timelines.record",
    "metrics.timeline_share": "timelines.share",
    **{f"metrics.{name}": f"sinks.{name}" for name in ("episodes", "wandb", "mlflow")},
    **{f"cluster.{name}": f"slurm.{name}" for name in (*_SLURM, "start_timeout", "lost_timeout")},
}
"""New names of settings, and of whole sections, that moved to the section of an extension."""


def removal(field: str, value: object = None) -> str | None:
    """Return the message for a setting or value that was removed, or moved; None for any other."""
    for old, new in MOVED_SETTINGS.items():
        if field == old or field.startswith(f"{old}."):
            return f"It moved: set {new}{field.removeprefix(old)}."
    sections = (name for name in REMOVED if field.startswith(f"{name}."))
    reason = REMOVED.get(field) or REMOVED.get(f"{field}={value}") or REMOVED.get(next(sections, ""))
    return reason and f"It was removed: {reason}. Remove it here, or use commit {LAST}, which has it."
