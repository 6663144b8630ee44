"""What passes and updates make of images."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import build_samples
from asyncrl.checkpoints.torch_dist import write_frame
from asyncrl.config import Config, load
from asyncrl.parallel import Parallel
from asyncrl.schema import Batch, Group
from asyncrl.trainer import sharded
from asyncrl.trainer.encoder import encoder_of
from asyncrl.trainer.head import Head
from asyncrl.trainer.microbatches import TokenAccumulator
from asyncrl.trainer.network import Network
from asyncrl.trainer.policy import Policy
from asyncrl.trainer.policy_state import PolicyState
from asyncrl.weights.export import save_hf
from tests.integration.ranks.joining import groups_of, joined
from tests.integration.vision import weights


def gradients(network: Network, groups: list[Group], parallel: Parallel) -> dict[str, Tensor]:
    """Return the log-probabilities and the gradients of a pass over the groups."""
    factors, samples = weights(groups), network.encoder.begin(groups, build_samples(groups))
    packs, seen = network.packs(samples), TokenAccumulator(len(factors), parallel)

    def visit(head: Head, one: Pack) -> Tensor:
        logprobs, _ = head.score(one, 1.0)
        seen.note(one.table_rows, logprobs=logprobs.detach())
        return (factors[one.table_rows] * logprobs).sum()

    network.train(packs, visit)
    out = {"logprobs": seen.gather(("logprobs",))[0]["logprobs"].float()}
    out["rows"] = torch.tensor([sum(one.num_tokens for one in packs), sum(one.tokens_apart for one in packs)])
    if not network.sharded:  # else each rank has only its shard of the sum
        for parameter in network.parameters():
            parameter.data.copy_(parameter.main_grad)  # type: ignore[attr-defined]
        out |= {f"gradient {key}": tensor.clone() for key, tensor in network.weights.hf_tensors()}
    return out


def started(config: Config, folder: Path, saved_as: str, groups: list[Group], parallel: Parallel) -> Tensor:
    """Return the log-probabilities from which the first batch's steps start, after checking that a policy that is
    restored from a checkpoint trains the second batch as the first policy does, to the bit."""
    policy = Policy(config, folder, parallel)
    policy.update(Batch(0, groups, {}))
    found, kept = policy.started.float(), PolicyState(policy)
    with tempfile.TemporaryDirectory() as saved:
        for name, state in kept.sharded().items():
            sharded.write(Path(saved) / name, list(state.written()), None)
            write_frame(Path(saved) / name, 1)
        other = Policy(config, folder, parallel)
        for name, state in PolicyState(other).sharded().items():
            state.load(Path(saved) / name)
    PolicyState(other).restore(kept.counters(), kept.of_extensions())
    figures, again = (one.update(Batch(1, groups, {})) for one in (policy, other))
    assert figures == again
    both = zip(policy.network.parameters(), other.network.parameters(), strict=True)
    assert all(one.equal(two) for one, two in both)
    save_hf(folder / saved_as, folder, policy.weights, parallel, "float32")
    if config.trainer.lora.rank:
        target = folder / f"{saved_as}-peft"
        policy.network.transformation.save(target, folder, policy.weights, parallel, "float32")
    return found


def compared(folder: Path, layout: str) -> None:
    """Write for each model of FOLDER/LAYOUT.json, with a frozen and with a trained vision tower, the log-probabilities
    of the policy's tokens in groups.msgpack, and the gradient of their weighted sum under HF's names, which must be
    those of transformers.

    With each of the options in it, train a policy for two batches, and another for the second one alone, from a
    checkpoint of the first; write the log-probabilities that the steps started from, and save the policy.
    """
    settings = json.loads((folder / f"{layout}.json").read_text())
    parallel = joined(load(settings["config"]).trainer)
    groups = groups_of(folder)
    for name in settings["models"]:
        out: dict[str, Tensor] = {}
        for tower in settings["towers"][name]:
            config = load(settings["config"] | {"vision": {"tower": tower}})
            encoder = encoder_of(config, folder / name, parallel)
            network = Network(config.trainer, folder / name, parallel, encoder=encoder)
            out |= {f"{tower} {key}": tensor for key, tensor in gradients(network, groups, parallel).items()}
        for option, values in settings["options"].get(name, {}).items():
            out[f"started {option}"] = started(load(values), folder / name, f"saved-{option}", groups, parallel)
        if parallel.exports:
            save_file(out, folder / f"{layout}-{name}-{parallel.pp_rank}.safetensors")
