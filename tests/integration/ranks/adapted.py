"""What a policy of adapters trains: its base is its reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from asyncrl.config import Config, read
from asyncrl.errors import ConfigError
from asyncrl.extensions.lora.transformation import Adapted
from asyncrl.extensions.lora.weights import AdapterWeights
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer.network import Network
from asyncrl.trainer.policy import Policy
from tests.integration.ranks.joining import groups_of, joined, with_settings
from tests.integration.ranks.recovery import with_solver


def split(network: Network) -> tuple[list[Tensor], list[Tensor]]:
    """Return copies of the trained and of the frozen parameters."""
    every = list(network.parameters())
    trained = [one.detach().clone() for one in every if one.requires_grad]
    return trained, [one.detach().clone() for one in every if not one.requires_grad]


def check_targets(config: Config, folder: Path, parallel: Parallel) -> None:
    """Assert that a layer that the model lacks is refused by name."""
    lora = config.trainer.lora.model_copy(update={"targets": ["q_proj", "q_prj"]})
    with pytest.raises(ConfigError, match=r"no linear layer q_prj: use some of \['"):
        Network(config.trainer, folder / "model", parallel, transformation=Adapted(lora))


def check_replicas(network: Network, parallel: Parallel) -> None:
    """Assert that matrices of which each tensor-parallel rank holds a copy are still equal."""
    for name, parameter in network.wrapped[0].named_parameters():
        if parameter.requires_grad and ".experts." not in name and not getattr(parameter, "tensor_model_parallel", 0):
            copies = [torch.empty_like(parameter) for _ in range(parallel.tp)]
            dist.all_gather(copies, parameter.detach(), group=parallel.tp_group)
            assert all(one.equal(parameter) for one in copies), name


def check_roles(config: Config, folder: Path, parallel: Parallel, groups: list[Group]) -> None:
    """Assert that updates with two roles give each adapter what updates with its role alone give it, and that all roles
    have one critic."""
    trainer = config.trainer.model_dump()
    trainer["lora"]["dropout"] = trainer["optimizer"]["clip_grad"] = 0.0
    roles = {"player": {"adapter": "policy"}, "solver": {"adapter": "solver"}}
    both = [with_solver(group) for group in groups]
    alone = {name: [only(group, name) for group in both] for name in ("", "solver")}

    def updated(roles: dict[str, Any], groups: list[Group], advantage: Any) -> Policy:
        made = with_settings(config, agents={"roles": roles}, trainer=trainer, algo={"advantage": advantage})
        policy = Policy(made, folder / "model", parallel)
        for version in range(2):
            policy.update(Batch(version, groups, {}))
        return policy

    together = AdapterWeights(updated(roles, both, "grpo").weights)
    for role, of_role in alone.items():
        adapter = role or "policy"
        policy = updated({adapter: roles[adapter]} if role else {}, of_role, "grpo")
        wanted = dict(AdapterWeights(policy.weights).tensors(adapter))
        found = dict(together.tensors(adapter))
        assert [key for key, tensor in wanted.items() if not found[key].equal(tensor)] == []
    critic, _ = updated(roles, both, "gae").others["critic"]
    assert not dict(AdapterWeights(critic.weights).tensors("solver"))


def only(group: Group, role: str) -> Group:
    """Return the group with the turns of one role."""
    episodes = [replace(one, turns=[turn for turn in one.turns if turn.role == role]) for one in group.trajectories]
    return replace(group, trajectories=episodes)


def base_as_reference(folder: Path) -> None:
    """Assert that three updates of the folder's batch, whose reference is the base of the adapters, are those with a
    reference of its own; that the base and copies of matrices stay as they are; and that resets and roles act on the
    adapters alone."""
    config = read(folder)
    parallel = joined(config.trainer)
    groups = groups_of(folder)
    kl = {**config.algo.kl.model_dump(), "reference_path": str(folder / "model")}
    own, other = (Policy(one, folder / "model", parallel) for one in (config, with_settings(config, algo={"kl": kl})))
    replays = (config.model_extra or {})["routing_replay"].kind != "none"
    check_targets(config, folder, parallel)
    if not replays:
        check_roles(config, folder, parallel, groups)
    assert own._reference is None
    assert other._reference is not None
    critic, _ = own.others["critic"]
    start, start_of_critic = split(own.network), split(critic)
    for version in range(3):
        figures, others = (policy.update(Batch(version, groups, {})) for policy in (own, other))
        assert figures == others, (version, figures, others)
        if not replays:  # the reference chooses its own experts
            assert (figures["kl/reference"] == 0) == (version == 0), figures["kl/reference"]
        assert figures["grad_norm"] > 0
    for network, (trained, frozen) in ((own.network, start), (critic, start_of_critic)):
        now = split(network)
        assert all(one.equal(two) for one, two in zip(frozen, now[1], strict=True))
        assert all(not one.equal(two) for one, two in zip(trained, now[0], strict=True))
    check_replicas(own.network, parallel)
    before = split(own.network)[0]
    own.hooks["sample_reuse"].after_update(4)
    for one, two, first in zip(before, split(own.network)[0], start[0], strict=True):
        assert two.equal(one.lerp(first, config.sample_reuse.reset_share))
    states = sum(one.numel() for one in own.optimizer.states())
    assert states <= 3 * sum(one.numel() for one in start[0]), "there are masters or moments of the base"
