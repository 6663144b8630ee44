"""What adapters compute and train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.checkpoints.torch_dist import write_frame
from asyncrl.config import AgentsConfig, TrainerConfig
from asyncrl.extensions.lora.transformation import Adapted
from asyncrl.extensions.lora.weights import AdapterWeights, adapter_of
from asyncrl.parallel import Parallel
from asyncrl.schema import POLICY
from asyncrl.trainer import sharded
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import Groups, TokenAccumulator
from asyncrl.trainer.network import Network
from asyncrl.trainer.optimizer import NetworkOptimizer
from asyncrl.trainer.sharded import ShardedState
from tests.integration.ranks.joining import joined
from tests.integration.updates import drawn_samples, token_weights

ROWS, ROLES = len(token_weights()), (POLICY, "solver")


def adapted(trainer: TrainerConfig, names: Sequence[str]) -> Adapted:
    """Return the adapters of these names, each of which plays a role."""
    return Adapted(trainer.lora, AgentsConfig.model_validate({"roles": {name: {"adapter": name} for name in names}}))


def scored(network: Network, parallel: Parallel, of: Groups | None = None) -> Tensor:
    """Return the log-probabilities of all tokens, or of those in some samples."""
    seen = TokenAccumulator(ROWS, parallel)

    def visit(head: Head, one: Pack) -> Tensor:
        logprobs, _ = head.score(one, 1.0)
        seen.note(one.table_rows, logprobs=logprobs)
        return logprobs.sum()

    network.score(network.packs(of or drawn_samples()), visit)
    return seen.gather(("logprobs",))[0]["logprobs"].float()


def gradients(network: Network, adapter: str = POLICY) -> dict[str, Tensor]:
    """Return the gradients by the names of `adapters`: they take the place of the weights, and are exported."""
    own = [(one, one.detach().clone()) for one in network.parameters() if one.requires_grad]
    for parameter, _ in own:
        parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    found = {name: tensor.clone() for name, tensor in AdapterWeights(network.weights).tensors(adapter)}
    for parameter, data in own:
        parameter.data.copy_(data)
    return found


def loss(head: Head, one: Pack) -> Tensor:
    """Return the loss of a pack."""
    return -(token_weights()[one.table_rows] * head.score(one, 1.0)[0]).sum()


def restored(network: Network, state: ShardedState, folder: Path) -> dict[str, Tensor]:
    """Return the adapters of a checkpoint, which is loaded over others."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.fill_(7)
    state.load(folder)
    return {name: tensor.clone() for name, tensor in AdapterWeights(network.weights).tensors()}


def check_checkpoints(network: Network, optimizer: NetworkOptimizer, folder: Path, layout: str, name: str) -> None:
    """Assert that a checkpoint of this layout restores every bit of the adapters, and one of a single rank the same
    values."""
    state, before = ShardedState(network, optimizer), dict(AdapterWeights(network.weights).tensors())
    before = {key: tensor.clone() for key, tensor in before.items()}
    (folder / f"{layout}-{name}-checkpoint").mkdir(exist_ok=True)
    sharded.write(folder / f"{layout}-{name}-checkpoint", list(state.written()), None)
    dist.barrier()
    write_frame(folder / f"{layout}-{name}-checkpoint", 1)
    of_one = restored(network, state, folder / f"single-{name}-checkpoint")
    mine = restored(network, state, folder / f"{layout}-{name}-checkpoint")
    for key, tensor in before.items():
        assert mine[key].equal(tensor), key
        torch.testing.assert_close(of_one[key], tensor, rtol=0, atol=0.02 if layout == "bfloat16" else 1e-4)


def check_roles(trainer: TrainerConfig, model: Path, parallel: Parallel, checkpoint: Path, *, first: bool) -> None:
    """Assert that each of two adapters gets the gradients, the scores and, without clipping, the updates of its samples
    alone, also where the second step follows before parameters were gathered, and that a checkpoint of a single rank
    restores every bit of both."""
    optimizer = trainer.optimizer.model_copy(update={"clip_grad": 0.0})
    trainer = trainer.model_copy(update={"optimizer": optimizer, "overlap_grad_reduce": False})
    plainly = trainer.model_copy(update={"overlap_param_gather": False})
    made = {ROLES: Network(trainer, model, parallel, transformation=adapted(trainer, ROLES))}
    made |= {(role,): Network(plainly, model, parallel, transformation=adapted(plainly, (role,))) for role in ROLES}
    optimizers = {names: NetworkOptimizer(trainer, network, 100) for names, network in made.items()}
    samples = [[replace(one, model=ROLES[n % 2]) for n, one in enumerate(group)] for group in drawn_samples()]
    own = {role: [[one for one in group if one.model == role] for group in samples] for role in ROLES}
    for seed, role in enumerate(ROLES):
        for network in (made[ROLES], made[role,]):
            draw = torch.Generator().manual_seed(seed)
            AdapterWeights(network.weights).load(
                lambda _, shape, draw=draw: torch.randn(*shape, generator=draw) * 0.1, role
            )
    both = scored(made[ROLES], parallel, samples)
    with made[ROLES].base(), made[ROLES[:1]].base():
        plain = scored(made[ROLES[:1]], parallel)
        torch.testing.assert_close(scored(made[ROLES], parallel, samples), plain, rtol=0, atol=1e-5)
    assert not torch.allclose(both, plain, atol=0.01)
    assert both.equal(sum(scored(made[role,], parallel, own[role]) for role in ROLES))
    before = {key: one.clone() for key, one in AdapterWeights(made[ROLES].weights).tensors()}
    for _ in range(2):
        for names, network in made.items():
            optimizers[names].zero_grad()
            network.train(network.packs(samples if names == ROLES else own[names[0]]), loss)
        for role in ROLES if not made[ROLES].sharded else ():
            check_equal(gradients(made[ROLES], role), gradients(made[role,], role))
        assert all(one.step()[1] for one in optimizers.values())
    made[ROLES].gather()
    assert all(not one.equal(before[key]) for key, one in AdapterWeights(made[ROLES].weights).tensors())
    for role in ROLES:
        check_equal(
            dict(AdapterWeights(made[ROLES].weights).tensors(role)),
            dict(AdapterWeights(made[role,].weights).tensors(role)),
        )
    check_restored(made[ROLES], optimizers[ROLES], checkpoint, parallel, first=first)


def check_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Assert that tensors are equal to the bit."""
    assert found.keys() == wanted.keys()
    assert [key for key, tensor in wanted.items() if not found[key].equal(tensor)] == []


def check_restored(
    network: Network, optimizer: NetworkOptimizer, folder: Path, parallel: Parallel, *, first: bool
) -> None:
    """Write a checkpoint, or assert that another layout reads all its tensors, moments included."""
    state = ShardedState(network, optimizer)
    if first:
        folder.mkdir()
        sharded.write(folder, list(state.written()), None)
        write_frame(folder, 1)
        return
    state.load(folder)
    for piece in state.written():
        stored = replace(piece, tensor=torch.full_like(piece.tensor, torch.nan))
        sharded.read(folder, [stored])
        assert stored.tensor.equal(piece.tensor), piece.key
    keys = {piece.key for piece in state.written()}
    assert not keys or {adapter_of(key) for key in keys} == {*ROLES}


def compared(folder: Path, layout: str) -> None:
    """Write what must be as PEFT has it for each model of FOLDER/LAYOUT.json, with FOLDER/NAME-adapters.safetensors:
    log-probabilities, the gradients of the adapters, the adapters and the merged weights after one clipped update, and
    the base. Asserts that the base is untouched, and that checkpoints of any layout restore the adapters."""
    settings = json.loads((folder / f"{layout}.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    parallel = joined(trainer)

    for name, targets in settings["models"].items():
        lora = trainer.lora.model_copy(update={"targets": targets})
        network = Network(trainer, folder / name, parallel, transformation=Adapted(lora))
        out = {f"start {key}": tensor.clone() for key, tensor in AdapterWeights(network.weights).tensors()}
        given = load_file(folder / f"{name}-adapters.safetensors")
        used: set[str] = set()

        def read(key: str, shape: torch.Size, given: dict[str, Tensor] = given, used: set[str] = used) -> Tensor:
            assert given[key].shape == torch.Size(shape), key
            used.add(key)
            return given[key]

        AdapterWeights(network.weights).load(read)
        again = {key: tensor.clone() for key, tensor in AdapterWeights(network.weights).tensors()}
        dtype = getattr(torch, trainer.dtype)
        assert all(tensor.equal(given[key].to(dtype).float()) for key, tensor in again.items())
        optimizer = NetworkOptimizer(trainer, network, 100)
        out["logprobs"] = scored(network, parallel)
        with network.base():
            out["base_logprobs"] = scored(network, parallel)
        base = {key: tensor.clone() for key, tensor in network.weights.hf_tensors(merged=None)}
        frozen = [one.detach().clone() for one in network.parameters() if not one.requires_grad]
        optimizer.zero_grad()
        network.train(network.packs(drawn_samples()), loss)
        if not network.sharded:
            out |= {f"gradient {key}": tensor for key, tensor in gradients(network).items()}
        out["norm"] = torch.tensor(optimizer.step()[0])
        network.gather()
        out |= {f"after {key}": tensor.clone() for key, tensor in AdapterWeights(network.weights).tensors()}
        out |= {f"merged {key}": tensor.clone() for key, tensor in network.weights.hf_tensors()}
        out |= {f"base {key}": tensor for key, tensor in base.items()}
        still = [one.detach() for one in network.parameters() if not one.requires_grad]
        assert all(one.equal(two) for one, two in zip(frozen, still, strict=True))
        if not network.sharded:  # which pads its buffers
            trained = sum(one.numel() for one in network.parameters() if one.requires_grad)
            assert sum(one.numel() for one in network.gradients()) == trained
        if not trainer.lora.dropout:
            check_checkpoints(network, optimizer, folder, layout, name)
        if name == "dense" and trainer.dtype == "float32" and not trainer.lora.dropout:
            check_roles(trainer, folder / name, parallel, folder / "single-roles-checkpoint", first=layout == "single")
        if parallel.exports:
            save_file(
                {key: tensor.contiguous() for key, tensor in out.items()},
                folder / f"{layout}-{name}-{parallel.pp_rank}.out",
            )
        dist.barrier()
