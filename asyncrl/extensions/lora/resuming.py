"""Which checkpoints a run with adapters can resume."""

from __future__ import annotations

from asyncrl.checkpoints.manifest import Manifest
from asyncrl.config import AgentsConfig, Config
from asyncrl.errors import ConfigError

ADAPTERS = ("rank", "alpha", "targets", "rslora", "base")
"""Settings of trainer.lora that say what the adapters of a checkpoint compute."""


def check_adapters(config: Config, manifest: Manifest) -> None:
    """Check that the checkpoint's adapters, or the lack of them, are those of the settings. Raises
    ConfigError."""
    then = manifest.config["trainer"].get("lora", {})
    now = config.trainer.lora.model_dump()
    for name in ADAPTERS if then.get("rank") or now["rank"] else ():
        if then.get(name) != now[name]:
            raise ConfigError(
                f"trainer.lora.{name}",
                now[name],
                f"The checkpoint was written with {then.get(name)!r}: resume with that value, or start a new run.",
            )
    agents = AgentsConfig.model_validate(manifest.config.get("agents", {"roles": {}}))
    if (agents.adapters, agents.past) != (config.agents.adapters, config.agents.past):
        held = ", ".join(agents.adapters) + "".join(f", past versions of {name}" for name in agents.past)
        remedy = f"The checkpoint holds {held}: resume with the roles that it was written with, or start a new run."
        raise ConfigError("agents.roles", sorted(config.agents.roles), remedy)
