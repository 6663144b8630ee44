"""Checks of tasks, rewards and agents, also of a user's own."""

from __future__ import annotations

from pathlib import Path

from asyncrl import tasks
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks.scores import rewards
from asyncrl.user_code import announced


def check_files(config: Config) -> list[object]:
    """Refuse tasks, rewards and agents that cannot be built, and a missing chat template. Return the parts that they
    announce to extensions."""
    from asyncrl.rollout.agent import agents  # imports a web server

    with announced() as parts:
        built = tasks.build_all(config)
        rewards(config, built)
        if config.generates:
            agents(config, built, tell=print)
    template = config.model.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        raise ConfigError("model.chat_template", template, "There is no such file: set the path of a jinja file.")
    return parts
