"""Training of a layer of multi-token prediction (MTP), with which engines draft tokens (engine.speculative=mtp).

The layer reads the model's last hidden state of a token and the embedding of the token after it, and predicts the one
after that (DeepSeek-V3, arXiv 2412.19437, section 2.2). Here the pair stands in the row of its later token. The layer's
rows then have the targets of the model's own rows, and positions and attention follow the pack, whatever prefixes its
samples share. Attention depends on differences of positions alone, so that it makes no difference that all of them are
larger by one. A first token has no token before it: it stands in no pair.

Hidden states, embeddings and the output layer are detached, so that the loss trains the layer alone. The optimizer
clips the layer's gradient by its own norm (optimizer.py), so that the policy is what it would be without it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from asyncrl.algo.pack import Branch, Pack


def add(model: GPTModel, layer: ModuleSpec, norm: type) -> None:
    """Add Megatron's block of MTP to a whole model. Its transformer layer is built like `layer`."""
    spec = get_mtp_layer_spec(layer, use_transformer_engine=False)
    spec.submodules.enorm = spec.submodules.hnorm = spec.submodules.layer_norm = norm
    model.mtp = MultiTokenPredictionBlock(model.config, MultiTokenPredictionBlockSubmodules(layer_specs=[spec]))


def draft(model: GPTModel, hidden: Tensor, pack: Pack) -> Tensor:
    """Return the layer's hidden states [U, 1, H] of the rows that predict a token, given the model's, [N (/ tp under
    sequence parallelism), 1, H]."""
    (layer,), config = model.mtp.layers, model.config
    pairs, before = paired(pack)
    with torch.no_grad():
        embedded = model.embedding(pack.token_ids[None], pack.positions[None])
        if config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        hidden = hidden[before.clamp(min=0)]
        if config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden)
    angles = None if config.multi_latent_attention else model.rotary_pos_emb(len(pack.token_ids))
    out = layer._proj_and_transformer_layer(hidden, embedded, attention_mask=pairs, rotary_pos_emb=angles)
    if config.sequence_parallel:
        out = gather_from_sequence_parallel_region(out, tensor_parallel_output_grad=False)
    return out.index_select(0, pack.logit_rows)


def paired(pack: Pack) -> tuple[Pack, Tensor]:
    """Return the pack without attention to first tokens, and the row of the token before each token, [N]; -1 for first
    tokens."""
    before = torch.arange(-1, pack.num_tokens - 1)
    branches: list[Branch] = []
    above: list[Branch] = []
    for branch in pack.branches:
        above = [*above[: branch.depth], branch]
        begin = branch.begin
        before[begin] = above[-2].end - 1 if branch.depth else -1
        if not branch.depth:
            branches.append(Branch(begin, begin + 1, begin + 1, 0))
            begin += 1
        if begin < branch.end:
            branches.append(branch._replace(begin=begin))
    leaves, sizes = (torch.tensor(x) for x in ([b.leave for b in branches], [b.end - b.begin for b in branches]))
    ends, before = (x.to(pack.ends.device) for x in (leaves.repeat_interleave(sizes), before))
    return replace(pack, ends=ends, branches=tuple(branches)), before
