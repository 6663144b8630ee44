"""Parts of a run that are determined before anything starts: its machines, models, checkpoint and number formats.

The preflight takes the same steps, and reports what each of them refuses.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl import jsonl
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import precision, resume
from asyncrl.launch.checks.machines import check_devices, check_gpu_kinds, check_platforms
from asyncrl.launch.checks.model import check_model
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Placement, place
from asyncrl.launch.precision import Precision
from asyncrl.launch.resume import Resume
from asyncrl.lookup import active
from asyncrl.models import catalog
from asyncrl.models.architectures import flat
from asyncrl.network.addresses import MACHINE
from asyncrl.tasks.build import build_all
from asyncrl.tasks.scores import rewards
from asyncrl.user_code import announced

KEY = "ASYNCRL_API_KEY"


def run_key(config: Config) -> str:
    """Return the API key of a run: a new one, or with engine.urls the one in the environment, if set."""
    return (os.environ.get(KEY) if config.engine.urls else None) or secrets.token_hex(24)


def check_files(config: Config) -> list[object]:
    """Refuse tasks, rewards and agents that cannot be built, and a missing chat template. Return the parts that they
    announce to extensions."""
    from asyncrl.rollout.agent import agents  # imports a web server

    with announced() as parts:
        built = build_all(config)
        rewards(config, built)
        if config.generates:
            agents(config, built, tell=print)
    template = config.model.chat_template
    if template is not None and not Path(template).expanduser().is_file():
        raise ConfigError("model.chat_template", template, "There is no such file: set the path of a jinja file.")
    return parts


class Preparation:
    """The steps that lead to a run that can start. Each step raises ConfigError, or another AsyncRLError, for what it
    refuses; later steps need earlier ones."""

    def __init__(self, config: Config, run_dir: Path, cluster: Cluster, arguments: Sequence[str] = ()) -> None:
        """`arguments` are those of the command line."""
        self.config = config
        self.cluster = cluster
        self.run_dir = run_dir
        self.arguments = arguments
        self.key = run_key(config)
        self.hooks = [one.launch() for one in active(config).values()]
        self.announced: list[object] = []
        """What tasks, rewards and agents announced for the checks of extensions (user_code.announce)."""
        self._placement: Placement | None = None
        self.folders: dict[str, Path] = {}
        """Model folders by role."""
        self.hf: dict[str, dict[str, Any]] = {}
        """Contents of their config.json."""
        self.weights: dict[str, dict[str, tuple[int, ...]]] = {}
        """Shapes of the tensors, by name, of those that the preflight found complete, and which this run uses."""
        self.origin: Resume | None = None
        """The checkpoint that the run resumes from."""
        self.chosen = Precision(config)

    def all(self) -> None:
        """Take every step, and raise what the first of them refuses."""
        self.files()
        self.plan()
        self.place()
        for role in self.roles:
            self.find(role)
        self.models()
        self.choose_checkpoint()
        self.precision()
        for hooks in self.hooks:
            hooks.refuse(self)

    @property
    def roles(self) -> list[str]:
        """Return what the run may have a model folder for: its policy, and what is not trained."""
        return ["model", *self.config.frozen]

    @property
    def placement(self) -> Placement:
        """Return the assignment of processes to machines."""
        assert self._placement
        return self._placement

    @property
    def is_placed(self) -> bool:
        """Return whether the machines are known and have room for the run."""
        return self._placement is not None

    @property
    def gpus(self) -> int:
        """Number of GPUs per machine, as addresses.json will have it."""
        return max((len(node.gpus) for node in self.cluster.nodes), default=0)

    def files(self) -> None:
        """Build the tasks, rewards and agents."""
        self.announced = check_files(self.config)

    def plan(self) -> None:
        """Let extensions choose settings by the machines of the run. A job is planned when it starts."""
        for hooks in self.hooks if self.cluster.here else ():
            self.config = hooks.plan(self)
        self.chosen = Precision(self.config)

    def place(self) -> None:
        """Find the machines, and place the run on them."""
        self.cluster.probe(self.config)
        if not self.cluster.here and any(hooks.plans for hooks in self.hooks):
            return
        if self.config.cluster.is_local:
            check_devices(self.config, self.gpus)
        check_platforms(self.config, self.gpus)
        nodes = self.cluster.nodes
        self._placement = place(self.config, nodes)
        machines = self.cluster.machines if self.gpus else ()
        check_gpu_kinds(self.config, self._placement.fleets["engine"], nodes, machines)

    def find(self, role: str) -> None:
        """Find the folder of a model; a built-in one is created first. Nothing happens if the role has no model."""
        name = self.config.model.path if role == "model" else getattr(self.config, role).model
        for hooks in self.hooks if role == "model" else ():
            name = hooks.model(self.config) or name
        if name:
            self.folders[role] = catalog.resolve(name, "model.path" if role == "model" else f"{role}.model")

    def read(self, role: str) -> dict[str, Any]:
        """Return the contents of a model's config.json, with the fields of the text model at the top."""
        if role not in self.hf:
            file = self.folders[role] / "config.json"
            try:
                self.hf[role] = flat(json.loads(file.read_text()))
            except (OSError, ValueError) as error:
                field = "model.path" if role == "model" else f"{role}.model"
                raise ConfigError(field, str(file), f"It cannot be read ({error}): name a folder of HF.") from None
        return self.hf[role]

    def models(self) -> None:
        """Check that the policy can be built, and read the config.json of the other models."""
        check_model(self.config, self.read("model"), self.gpus)
        for role in self.folders:
            self.read(role)

    def choose_checkpoint(self) -> None:
        """Choose the checkpoint to resume from."""
        self.origin = resume.choose(self.config, self.run_dir)

    def precision(self) -> None:
        """Resolve what is left to extensions, the trainer's layers, and every dtype on the machines that will run the
        part."""
        roles = {"trainer": "model", "engine": "model", **{role: role for role in self.config.frozen}}
        measurable = {role: hf for role, hf in self.hf.items() if "hidden_size" in hf}  # not every judge's has one
        models = {part: measurable[role] for part, role in roles.items() if role in measurable}
        before = self.origin.manifest.config if self.origin else precision.recorded(self.config, self.run_dir)
        given = {part: found for hooks in self.hooks for part, found in hooks.formats(self).items()}
        config = precision.resolve_layers(self.resolved(self.config), self.gpus, before)
        self.chosen = precision.resolve(
            config, models, self.placement, self.gpus, self.cluster, before=before, given=given
        )

    def resolved(self, config: Config) -> Config:
        """Return settings with the choices of extensions, once the model is found."""
        for hooks in self.hooks if "model" in self.hf else ():
            config = hooks.resolved(config, self.hf["model"], self.gpus)
        return config

    def notes(self) -> list[str]:
        """Return lines for the console about what was chosen, and those of extensions."""
        chosen = [choice.line() for choice in self.chosen.choices]
        more = [line for hooks in self.hooks for line in hooks.notes(self)]
        return [*chosen, *more]

    def begins(self) -> None:
        """Write to the run folder what was chosen, machine.json with the dtypes, and what extensions keep there."""
        choices = {choice.part: {"dtype": choice.dtype, "why": choice.why} for choice in self.chosen.choices}
        jsonl.replace(self.run_dir / MACHINE, {"dtype": choices})
        for hooks in self.hooks:
            hooks.begins(self)
