"""The micro-batches of this rank for one optimizer step: those of its replica, or its context-parallel part of them."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.algo.balance import Costs, assign_micro_batches
from asyncrl.algo.context_parallel_split import bounds_of, part
from asyncrl.algo.pack import Pack, pack
from asyncrl.algo.samples import Sample
from asyncrl.config import TrainerConfig
from asyncrl.parallel import Parallel

Groups = Sequence[list[Sample]]

IDLE = [[Sample([0], [0], [False], number=0, first_row=0)]]
"""A placeholder micro-batch of one token that is not trained."""


def packs_of_rank(groups: Groups, trainer: TrainerConfig, parallel: Parallel, costs: Costs) -> list[Pack]:
    """Return the packs of this rank, at least one. Replicas that share experts communicate in every micro-batch, so all
    of them get as many as the replica with the most. Interleaved stages run whole rounds of micro-batches."""
    p = parallel
    rounds = p.pp if trainer.virtual_pipeline > 1 else 1
    experts_cross_replicas = p.tp % (p.etp * p.ep) != 0
    limit, share = trainer.micro_batch_tokens, trainer.share_prompts
    mine = assign_micro_batches(groups, p.dp, limit, costs, share=share, equal=experts_cross_replicas, rounds=rounds)[
        p.dp_rank
    ]
    multiple = p.tp if trainer.sequence_parallel else 1
    packs = [pack(batch or IDLE, share=share, multiple=multiple * p.cp) for batch in mine]
    if p.cp > 1:
        packs = [part(one, bounds_of(one, p.cp, multiple, costs), p.cp_rank) for one in packs]
    return [one.to(p.device) for one in packs]
